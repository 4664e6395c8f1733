"""`coissue up`: a local Ray if none is there, the config deployed, progress, and the way back."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from coissue.deployments.cli.main import fetch_status, status_table
from coissue.deployments.config_file import IMPORT_PATH, ServeConfig
from coissue.deployments.discovery import FAILED_PREFIX, apply_serve_flags
from coissue.deployments.settings import AppSettings

POLL_S: Final = 0.5


class UpError(Exception):
    """One line for people."""


def serve_until_interrupted(
    config: dict[str, Any], settings: AppSettings, *, haproxy: bool, console: Console
) -> None:
    if haproxy:
        apply_serve_flags()
    with _interruptible() as interrupted, _ray(console), _deployed(config):
        base = _base_url(config)
        if haproxy:
            port = ServeConfig.model_validate(config).http_options.port
            console.print(
                f"HAProxy listens on port {port} of [bold]all interfaces[/bold], whatever host "
                "says: close it in the firewall of an open machine, or use --no-haproxy.",
                highlight=False,
            )
        if _show_progress(base, config, settings, console, interrupted):
            _print_urls(base, settings, console)
            interrupted.wait()
        console.print("Shutting down.")


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM; the second Ctrl-C interrupts as usual."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.set()

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ray(console: Console) -> Iterator[None]:
    """Connected to the Ray of this machine, or to one of our own that ends with us."""
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Tenants' factories are imported from where the command is run.
    here = os.getcwd()
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    try:
        ray.init(
            address="auto", namespace="serve", log_to_driver=False, logging_level=logging.ERROR
        )
        console.print("Using the Ray that runs here, with the flags that it was started with.")
    except ConnectionError:
        console.print("Starting Ray on this machine.")
        ray.init(
            address="local",
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            dashboard_host="127.0.0.1",
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _deployed(config: dict[str, Any]) -> Iterator[None]:
    """The config's applications; only those are taken down if Serve ran before."""
    import ray
    from pydantic import ValidationError
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise UpError(f"{path}: {first['msg']}") from None
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ran_before = True
    except ValueError:
        ran_before = False
    try:
        client = serve_start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
        )
        client.deploy_apps(schema, _blocking=False)
        yield
    finally:
        if ran_before:
            ours = {application.name for application in schema.applications}
            for name in serve.status().applications:
                if name in ours or name.startswith(FAILED_PREFIX):
                    serve.delete(name)
        else:
            serve.shutdown()


def _show_progress(
    base: str,
    config: dict[str, Any],
    settings: AppSettings,
    console: Console,
    interrupted: threading.Event,
) -> bool:
    """Until all tenants are ready or failed: True. Interrupted: False."""
    started = time.monotonic()
    with Live(console=console, refresh_per_second=4) as live:
        while not interrupted.wait(POLL_S):
            _raise_if_deploy_failed(config)
            tenants = _tenants_now(base, settings)
            table = status_table(tenants)
            table.caption = f"{time.monotonic() - started:.0f} s"
            live.update(table)
            if all(tenant["state"] in ("ready", "failed") for tenant in tenants):
                return True
    return False


def _tenants_now(base: str, settings: AppSettings) -> list[dict[str, Any]]:
    """Every tenant of the config, also those that the application does not know yet."""
    try:
        known = {tenant["name"]: tenant for tenant in fetch_status(base, 2.0)["tenants"]}
    except (OSError, ValueError):
        known = {}
    return [
        known.get(tenant.name, {"name": tenant.name, "state": "waiting", "slo_class": tenant.slo})
        for tenant in settings.tenants
    ]


def _raise_if_deploy_failed(config: dict[str, Any]) -> None:
    from ray import serve

    ours = {entry.get("name", "default") for entry in config["applications"]}
    for name, application in serve.status().applications.items():
        if application.status == "DEPLOY_FAILED" and name in ours:
            raise UpError(f"application {name!r} failed: {' '.join(application.message.split())}")


def _base_url(config: dict[str, Any]) -> str:
    serve = ServeConfig.model_validate(config)
    host = serve.http_options.host
    host = "127.0.0.1" if host == "0.0.0.0" else host
    ours = next(a for a in serve.applications if a.import_path == IMPORT_PATH)
    prefix = f"{serve.http_options.root_path}{ours.route_prefix or '/'}".rstrip("/")
    return f"http://{host}:{serve.http_options.port}{prefix}"


def _print_urls(base: str, settings: AppSettings, console: Console) -> None:
    name = settings.tenants[0].name
    console.print()
    for text, url in (
        ("plain route", f"POST {base}/tenants/{name}"),
        ("Open Inference Protocol", f"POST {base}/v2/models/{name}/infer"),
        ("status", f"{base}/status"),
        ("metrics", f"{base}/metrics"),
    ):
        console.print(f"{text:>24}  {url}", highlight=False)
    console.print("Ctrl-C ends it.")
