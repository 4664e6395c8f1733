"""Names under which the parts find each other in a Ray cluster, and the flags Serve runs best with.

Imports neither torch nor ray at the top: replicas, the command line and tests all read it.
"""

from __future__ import annotations

import os
from typing import Any

NAMESPACE = "coissue"
CONTROL = "Control"
POOL = "Pool"
#: Tenants that failed show as Serve applications of this prefix, so `serve status` tells why.
FAILED_PREFIX = "tenant-"
#: Set on every node before Ray starts. HAProxy binds to all interfaces: firewall an open host.
#: The access log is switched off in the YAML, because its buffered flushes cost 20 ms at p99.
SERVE_FLAGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Shutting down waits this long for outside load balancers to notice; there is none.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "5",
}
#: With num_gpus=0 Ray leaves every GPU visible: a replica must not open a context of its own.
BLIND = {"num_cpus": 0.1, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}}


def scheduler_name(device_index: int = 0) -> str:
    return f"coissue-scheduler-{device_index}"


def apply_serve_flags() -> None:
    """Put the flags into this process's environment, for the Ray that it starts."""
    for name, value in SERVE_FLAGS.items():
        os.environ.setdefault(name, value)


async def find_endpoint(device_index: int = 0) -> Any:
    """The endpoint of the running scheduler. Raises `ValueError` while there is none."""
    import ray

    actor = ray.get_actor(scheduler_name(device_index), namespace=NAMESPACE)
    return await actor.endpoint.remote()
