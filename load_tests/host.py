"""The served side of a load test: one Ray cluster with one HAProxy, in a process of its own.

Run as a child by `hosted.Hosted`, which speaks to it over stdin and stdout: one JSON object per
line, {"verb": ..., ...} in and {"ok": ...} or {"error": ...} out. The end of stdin (the parent is
done, was interrupted or has died) stops everything, so nothing is left behind. The product and its
baselines run in the same cluster, with the same ingress and flags, and are loaded in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from coissue.deployments.discovery import NAMESPACE, apply_serve_flags, scheduler_name

#: Serve handles belong to one loop, for the life of the process.
LOOP = asyncio.new_event_loop()
#: Logical CPUs of the cluster: room for every replica, whatever the machine has.
LOGICAL_CPUS = 64
#: The same for all: without it Serve makes a log record per request and drops it.
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def start(config: Path | None, stock: int, empty: bool, port: int) -> None:
    """Start Ray and Serve with the asked applications; returns when the calls are accepted."""
    apply_serve_flags()
    import ray
    from ray import serve

    ray.init(
        address="local",  # not the cluster of RAY_ADDRESS, nor one that `ray start` left a trace of
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}},
    )
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config=QUIET,
    )
    targets = list_targets(config, stock, empty)
    serve.run_many(targets, wait_for_applications_running=True)


def list_targets(config: Path | None, stock: int, empty: bool) -> list[Any]:
    from ray.serve import RunTarget

    from load_tests.parity import empty_serve, stock_serve

    targets = []
    if config is not None:
        targets.append(load_application(config))
    for head in range(stock):
        name = stock_serve.name_of(head)
        app = stock_serve.Stock.options(name=name, logging_config=QUIET).bind(head)
        targets.append(RunTarget(app, name, f"/{name}", logging_config=QUIET))
    if empty:
        app = empty_serve.Empty.options(logging_config=QUIET).bind()
        targets.append(RunTarget(app, "empty-serve", "/empty-serve", logging_config=QUIET))
    return targets


def load_application(config: Path) -> Any:
    """The one application of a Serve YAML of the product."""
    from ray.serve import RunTarget

    from coissue.deployments.app import build
    from coissue.deployments.settings import AppSettings

    (given,) = yaml.safe_load(config.read_text())["applications"]
    # No Prometheus port of its own: another cluster of this machine may have it.
    given["args"].setdefault("scheduler", {})["metrics_port"] = None
    app = build(AppSettings.model_validate(given["args"]))
    return RunTarget(app, given["name"], given["route_prefix"], logging_config=QUIET)


def find_scheduler() -> Any:
    import ray

    return ray.get_actor(scheduler_name(), namespace=NAMESPACE)


def set_policy(policy: str) -> None:
    import ray

    ray.get(find_scheduler().set_policy.remote(policy))


def save_timeline(path: str) -> int:
    import ray

    data = ray.get(find_scheduler().timeline.remote())
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(path).write_bytes(data)


def tune_stock(count: int, batch_size: int, wait_s: float) -> None:
    from ray import serve

    from load_tests.parity import stock_serve

    async def tune() -> None:
        for head in range(count):
            handle = serve.get_app_handle(stock_serve.name_of(head))
            await handle.tune.remote(batch_size, wait_s)

    LOOP.run_until_complete(tune())


def attach_head(head: int, slo: str) -> str:
    """Capture one more backbone tenant and attach it to the running scheduler."""
    import ray

    from coissue.deployments.captures import Captures
    from coissue.deployments.settings import ModelSettings, TenantSettings

    model = ModelSettings(factory="load_tests.parity.models:backbone", kwargs={"head": head})
    tenant = TenantSettings(name=f"head-{head}", model=model, slo=slo)
    with tempfile.TemporaryDirectory(prefix="coissue-extra-") as folder:
        captures = Captures(Path(folder))
        artifact = LOOP.run_until_complete(captures.capture(tenant, 1))
        captures.stop()
        error = ray.get(find_scheduler().attach.remote(tenant.model_dump(), 1, artifact))
    if error:
        raise RuntimeError(error)
    return tenant.name


VERBS: dict[str, Callable[..., Any]] = {
    "policy": set_policy,
    "timeline": save_timeline,
    "tune_stock": tune_stock,
    "attach_head": attach_head,
}


def answer(line: str) -> dict[str, Any]:
    try:
        call = json.loads(line)
        return {"ok": VERBS[call.pop("verb")](**call)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def stop() -> None:
    import ray
    from ray import serve

    serve.shutdown()
    ray.shutdown()


def take_stdout() -> Any:
    """The real stdout for answers; whatever libraries print goes to stderr, the log."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--stock", type=int, default=0, help="stock Serve replicas")
    parser.add_argument("--empty", action="store_true", help="an empty Serve deployment")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", type=Path, help="removed at the end")
    args = parser.parse_args()
    out = take_stdout()
    asyncio.set_event_loop(LOOP)
    # Ctrl-C in the terminal reaches the parent, which closes stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start(args.config, args.stock, args.empty, args.port)
        print(json.dumps({"ok": "started"}), file=out)
        for line in sys.stdin:
            print(json.dumps(answer(line)), file=out)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out)
        raise
    finally:
        stop()
        if args.folder is not None:
            shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
