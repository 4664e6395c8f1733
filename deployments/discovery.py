"""Names under which the parts find each other in a Ray cluster, and the flags Serve runs best with.

Imports neither torch nor ray at the top: replicas, the command line and tests all read it.
"""

from __future__ import annotations

import gc
import os
import random
import socket
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ray.serve.deployment import Deployment

NAMESPACE = "coissue"
CONTROL = "Control"
POOL = "Pool"
#: Tenants that failed show as Serve applications of this prefix, so `serve status` tells why.
FAILED_PREFIX = "tenant-"
#: Set on every node before Ray starts. HAProxy shows statistics on all interfaces, see below.
#: The access log is switched off in the YAML, because its buffered flushes cost 20 ms at p99.
SERVE_FLAGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Serve's counts of HTTP requests are then made by the replicas, not by an actor that reads a
    # log line of HAProxy for each request (40 us of CPU).
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # What tenants' code prints and raises reaches worker-*.err; without this it is dropped.
    "RAY_SERVE_LOG_TO_STDERR": "1",
    # Ray's agent works off its histograms every ten seconds, 37 us for each request since: half a
    # second of a core at 1,600 requests/s, in which queues grow. Our own metrics are apart from it.
    "RAY_enable_metrics_collection": "0",
    # Else Ray tells its makers what it runs on.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Between the pool and a tenant's own code; 4 MiB would be the most, less than a body may have.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 29),
    # Ray runs its workers at nice 15: whatever else runs on the node would come first.
    "RAY_worker_niceness": "0",
    # Shutting down waits this long for outside load balancers to notice; there is none.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # Every `serve deploy` may replace HAProxy: the old one goes on with the requests that it has.
    # Longer than the longest deadline that an SLO class may have.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "630",
    # A client that sends nothing of its request or reads nothing of its answer for so long is cut
    # off. Waiting for a model does not count, nor does an idle connection.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # Serve starts a killed HAProxy again after three of these; its default is 10.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}
#: HAProxy's statistics for people and Prometheus. It shares a port in use silently with the owner,
#: so a second instance on a machine takes free ones; see `claim_port`.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": 9101, "RAY_SERVE_HAPROXY_STATS_PORT": 8404}
#: Serve's fallback proxies. Their sockets are shared by every cluster of a machine that keeps the
#: defaults, and while a replica is away HAProxy asks them: another cluster would answer for ours.
FALLBACK_PORTS = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT")
#: Of a replica, for `serve.deployment`. One that was killed is noticed after `period`, one that
#: hangs after three times `timeout`; Serve's defaults are 10 and 30 s.
HEALTH: dict[str, Any] = {"health_check_period_s": 2, "health_check_timeout_s": 5}
#: With num_gpus=0 Ray leaves every GPU visible: a replica must not open a context of its own. It
#: claims no CPU: a tenth each let 20 start on two cores, and a killed control lost its to another.
BLIND = {"num_cpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}}


def as_deployment(decorated: type) -> Deployment:
    """What `serve.deployment` made of a class: mypy does not apply the decorators of classes."""
    return cast("Deployment", decorated)


def scheduler_name(device_index: int = 0) -> str:
    return f"coissue-scheduler-{device_index}"


def apply_serve_flags() -> None:
    """Put the flags into this process's environment, for the Ray that it starts."""
    os.environ.update(choose_serve_flags())


def choose_serve_flags() -> dict[str, str]:
    """The flags with ports that are free now; what the environment has wins."""
    chosen = dict(SERVE_FLAGS)
    for name, port in HAPROXY_PORTS.items():
        chosen[name] = str(claim_port(port) or find_port(0))
    for name in FALLBACK_PORTS:  # never the default: two clusters may start at the same moment
        chosen[name] = str(find_port(0))
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


#: Port -> the descriptor that holds its claim until this process ends.
_CLAIMS: dict[int, int] = {}


def claim_port(port: int) -> int:
    """The port, if nobody listens on it or has claimed it to do so later; or else 0.

    A port is taken long after it was chosen, by another process. So a claim is a name that the
    kernel gives to one process at a time, whatever the user, and takes back when that ends.
    """
    if port not in _CLAIMS:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0coissue-port-{port}")
        except OSError:
            claim.close()
            return 0
        _CLAIMS[port] = claim.detach()
    return find_port(port)


#: Below the range of outgoing connections, any of which could take a port before it is used.
_OWN_PORTS = range(20_000, 30_000)


def find_port(port: int) -> int:
    """The port if nobody listens on it, or else 0; for port 0 a free one."""
    if port == 0:
        return next(filter(find_port, random.sample(_OWN_PORTS, len(_OWN_PORTS))), 0)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def settle_garbage() -> None:
    """Call once a process has started. What lives now is not looked at again by the collector, and
    it runs rarely: a full collection took over 100 ms here, and small ones 8 % of the scheduler.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def find_endpoint(device_index: int = 0) -> Any:
    """The endpoint of the running scheduler. Raises `ConnectionError` while there is none."""
    import ray

    try:
        actor = ray.get_actor(scheduler_name(device_index), namespace=NAMESPACE)
        return await actor.endpoint.remote()
    except (ValueError, ray.exceptions.RayError) as error:
        raise ConnectionError("no scheduler is running") from error
