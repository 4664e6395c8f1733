"""`coissue up`: a Ray of its own or a given one, the config deployed, progress, the way back."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live

from coissue.deployments.cli.cluster import UpError, join, leave
from coissue.deployments.cli.main import fetch_status, show_deploy_error, status_table
from coissue.deployments.config_file import IMPORT_PATH, ServeConfig
from coissue.deployments.discovery import FAILED_PREFIX, HAPROXY_PORTS, apply_serve_flags, find_port
from coissue.deployments.run_dir import sweep_run_dirs
from coissue.deployments.settings import AppSettings

POLL_S: Final = 0.5
#: Between two looks at what others deploy.
TELL_S: Final = 3.0
#: For one answer of `/status`, which may ask control.
STATUS_S: Final = 5.0
STOP_S: Final = 60.0
REACH_S: Final = 10.0
#: Processes that a Ray cannot go on without, by its names for them.
NEEDED: Final = ("gcs_server", "raylet")
CONTROLLER: Final = "SERVE_CONTROLLER_ACTOR"


def serve_until_interrupted(
    config: dict[str, Any], settings: AppSettings, *, haproxy: bool, address: str | None,
    console: Console,
) -> None:  # fmt: skip
    port = ServeConfig.model_validate(config).http_options.port
    _check_http(config, address)
    if address is None and not find_port(port):
        raise UpError(f"http_options.port: something listens on port {port} already (see --port)")
    if haproxy:
        apply_serve_flags()
    with _interruptible() as interrupted, _ray(address, console) as ray_url:
        if interrupted.is_set():
            return
        with _ending_with_ray(interrupted, console), _deployed(config, settings) as http:
            base = _base_url(http, config, address)
            if http.port != port:
                console.print(
                    f"Serve runs here with port {http.port}: used, not http_options.port."
                )
            if haproxy and address is None:
                _warn_of_statistics(console)
            if _show_progress(base, config, settings, console, interrupted):
                _print_urls(base, ray_url, settings, console)
                _wait_and_tell(base, console, interrupted)
            console.print("Shutting down.")


def _warn_of_statistics(console: Console) -> None:
    metrics, page = (os.environ[name] for name in HAPROXY_PORTS)
    console.print(
        f"HAProxy shows its statistics on [bold]all interfaces[/bold], port {metrics} (metrics) "
        f"and {page} (a page): "
        "close them in the firewall of an open machine, or use --no-haproxy.",
        highlight=False,
    )


def _check_http(config: dict[str, Any], address: str | None) -> None:
    """What Serve finds out late or never, while `up` waits for an answer over HTTP."""
    serve = ServeConfig.model_validate(config)
    host = serve.http_options.host
    if serve.proxy_location == "Disabled":
        raise UpError("proxy_location: Disabled serves no HTTP, which `coissue up` needs")
    for index, application in enumerate(serve.applications):
        if application.import_path == IMPORT_PATH and application.route_prefix is None:
            raise UpError(f"applications.{index}.route_prefix: `coissue up` needs one, not null")
    if address is None:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family) as probe:
                probe.bind(place)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise UpError(f"http_options.host: {host!r} is no address here: {why}") from None


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM, at once, also while the main thread is in a call of Ray's
    that does not come back; the second Ctrl-C interrupts as usual."""
    interrupted = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while came := reader.recv(1):
            if came[0] in numbers:
                interrupted.set()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    thread = threading.Thread(target=listen, daemon=True, name="coissue-signals")
    thread.start()
    told = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(told)
        writer.close()
        thread.join()
        reader.close()


@contextlib.contextmanager
def _ray(address: str | None, console: Console) -> Iterator[str]:
    """Connected to the Ray at `address`, or to one of our own that ends with us. Its dashboard."""
    import ray
    import ray.serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # Tenants' factories are imported from where the command is run.
    here = os.getcwd()
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    options: dict[str, Any] = {} if address else {"dashboard_host": "127.0.0.1"}
    console.print(
        f"Using the Ray at {address}, with the flags that it was started with."
        if address
        else "Starting Ray on this machine."
    )
    if address:
        _check_reachable(address)
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(
            address=address or "local",
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except ValueError as error:  # Ray does not take the address
        said = " ".join(str(error).split())
        raise UpError(f"--address: {address!r} must look like host:port or auto: {said}") from None
    except ConnectionError as error:
        token = "" if os.environ.get("RAY_AUTH_MODE") else " (does it want RAY_AUTH_MODE=token?)"
        raise UpError(f"no Ray at {address}: {' '.join(str(error).split())}{token}") from None
    signal.signal(signal.SIGTERM, on_terminate)  # Ray took it
    node = "" if address else ray.get_runtime_context().get_node_id()
    try:
        yield f"http://{context.dashboard_url}" if context.dashboard_url else ""
    finally:
        ray.shutdown()
        sweep_run_dirs()
        if node:
            _end_haproxy(node)


@contextlib.contextmanager
def _ending_with_ray(interrupted: threading.Event, console: Console) -> Iterator[None]:
    """Where a process of a Ray of our own is killed, or a signal went to all processes, Ray's calls
    wait for a minute and then end this process: it goes at once instead, and takes the rest along.
    """
    import ray

    node: Any = ray._private.worker._global_node
    node_id = ray.get_runtime_context().get_node_id()
    over, is_seen = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            ended = [kind for kind, _ in node.dead_processes() if kind in NEEDED]
            if ended and not over.is_set():
                is_seen.set()
                if not interrupted.is_set():
                    logs = f"{_session_folder()}/logs"
                    console.print(f"Ray has ended, its {ended[0]} is gone: see {logs}")
                console.show_cursor(True)
                # Some of Ray's would look for it for a minute more.
                left = [c for _, process in node.live_processes() for c in _children(process.pid)]
                node.kill_all_processes(check_alive=False)
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                sweep_run_dirs()
                _end_haproxy(node_id)
                os._exit(0 if interrupted.is_set() else 1)

    watching = threading.Thread(target=watch, daemon=True, name="coissue-watch")
    watching.start()
    try:
        yield
    except Exception as error:  # perhaps of a call that Ray's end failed before it was seen
        # Told to end, Ray's processes refuse calls first and may take seconds until they are gone.
        if is_seen.wait(STOP_S if isinstance(error, ray.exceptions.RayError) else 2 * POLL_S):
            watching.join()  # it ends this process
        raise
    finally:
        over.set()


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError):
        return [int(child) for path in lists for child in path.read_text().split()]
    return []


def _end_haproxy(node: str) -> None:
    """Of a node that is gone, with its files: Serve leaves them, and where a signal ended the proxy
    actor, HAProxy itself."""
    from ray.serve._private import constants

    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if b"haproxy" in command and node.encode() in command:
                os.kill(int(entry.name), signal.SIGTERM)
    for path in (
        constants.RAY_SERVE_HAPROXY_CONFIG_FILE_LOC,
        constants.RAY_SERVE_HAPROXY_SOCKET_PATH,
    ):
        shutil.rmtree(os.path.join(os.path.dirname(path), node), ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes, and cannot be interrupted."""
    host, port = _split_address(address)
    if address != "auto":
        if not host or not (port.isascii() and port.isdigit()):
            raise UpError(f"--address: {address!r} must look like host:port, or be auto")
        try:
            socket.create_connection((host, int(port)), REACH_S).close()
        except (OSError, OverflowError) as error:
            raise UpError(f"no Ray at {address}: {error}") from None


def _split_address(address: str) -> tuple[str, str]:
    """Host and port of Ray's "host:port" or "ray://host:port"; of "auto" neither."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), port


@contextlib.contextmanager
def _deployed(config: dict[str, Any], settings: AppSettings) -> Iterator[Any]:
    """The config's applications, which end with us. Serve's HTTP options."""
    import ray
    from pydantic import ValidationError
    from ray.serve._private.api import serve_start
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise UpError(f"{path}: {first['msg']}") from None
    options: dict[str, Any] = {
        "http_options": schema.http_options.model_dump(),
        "proxy_location": schema.proxy_location,
        "grpc_options": gRPCOptions(**schema.grpc_options.model_dump()),
    }
    with contextlib.suppress(ValueError):
        ray.get_actor(CONTROLLER, namespace="serve")
        options = {}  # Serve runs, with those it was started with
    has_joined = False
    try:
        client = serve_start(**options)
        join(client, schema)
        has_joined = True
        yield client.http_config
    finally:
        if options:
            _stop_serve()
        elif has_joined:
            leave(client, schema, [FAILED_PREFIX + tenant.name for tenant in settings.tenants])


def _stop_serve() -> None:
    """As `serve.shutdown`, which waits in a call that the end of the controller fails: Ray prints
    such a failure as an error."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayActorError):
        controller = ray.get_actor(CONTROLLER, namespace="serve")
        ray.get(controller.graceful_shutdown.remote(wait=False), timeout=STOP_S)
        until = time.monotonic() + STOP_S
        while time.monotonic() < until:
            time.sleep(0.1)
            ray.get_actor(CONTROLLER, namespace="serve")


def _show_progress(
    base: str, config: dict[str, Any], settings: AppSettings, console: Console,
    interrupted: threading.Event,
) -> bool:  # fmt: skip
    """Until all tenants are ready or failed: True. Interrupted: False."""
    started, told = time.monotonic(), dict[str, str]()
    with Live(console=console, refresh_per_second=4) as live:
        while not interrupted.wait(POLL_S):
            _raise_if_deploy_failed(config)
            tenants = _tenants_now(_status_now(base), settings)
            seconds = f"{time.monotonic() - started:.0f} s"
            end = "" if console.is_terminal else "\n"  # which ends the last table's line
            live.update(Group(status_table(tenants), seconds + end))
            states = {str(tenant["name"]): str(tenant["state"]) for tenant in tenants}
            if not console.is_terminal:  # which sees the table at the end only
                for name, state in states.items() - told.items():
                    console.print(f"{seconds:>6} {name}: {state}", markup=False, highlight=False)
            told = states
            if all(tenant["state"] in ("ready", "failed") for tenant in tenants):
                return True
    return False


def _wait_and_tell(base: str, console: Console, interrupted: threading.Event) -> None:
    """Until interrupted; configs deployed meanwhile that Serve does not run are told once."""
    told = ""
    while not interrupted.wait(TELL_S):
        with contextlib.suppress(OSError, ValueError):
            said = str(fetch_status(base, STATUS_S).get("deploy_error", ""))
            if said != told:
                show_deploy_error(said, console)
            told = said


def _status_now(base: str) -> dict[str, Any]:
    """Raises `UpError` if the scheduler cannot start: waiting longer is no use."""
    try:
        status = fetch_status(base, STATUS_S)
    except (OSError, ValueError):
        return {"tenants": []}
    scheduler = status.get("scheduler")
    if isinstance(scheduler, dict) and scheduler.get("cannot_start"):
        raise UpError(str(scheduler["error"]))
    return status


def _tenants_now(status: dict[str, Any], settings: AppSettings) -> list[dict[str, Any]]:
    """Every tenant of the config, also those that the application does not know yet."""
    known = {tenant["name"]: tenant for tenant in status["tenants"]}
    return [
        known.get(tenant.name, {"name": tenant.name, "state": "waiting", "slo_class": tenant.slo})
        for tenant in settings.tenants
    ]


def _raise_if_deploy_failed(config: dict[str, Any]) -> None:
    from coissue.deployments.failures import find_deploy_error

    for entry in config["applications"]:
        name = entry.get("name", "default")
        if said := find_deploy_error(name):
            raise UpError(f"application {name!r} failed: {' '.join(said.split())}")


def _base_url(http: Any, config: dict[str, Any], address: str | None) -> str:
    """Where the coissue application is, by the HTTP options that Serve runs with."""
    host = http.host
    if host == "0.0.0.0":
        host = _split_address(address or "")[0] or "127.0.0.1"
    applications = ServeConfig.model_validate(config).applications
    ours = next(a for a in applications if a.import_path == IMPORT_PATH)
    prefix = f"{http.root_path}{ours.route_prefix or '/'}".rstrip("/")
    return f"http://{host}:{http.port}{prefix}"


def _show_command(ray_url: str) -> str:
    """A Ray of our own wants the token that it put into the user's home."""
    mode = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    return f"{mode}serve status -a {ray_url}" if ray_url else "serve status"


def _gcs_address() -> str:
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address


def _session_folder() -> str:
    import ray

    node: Any = ray._private.worker._global_node
    folder: str = node.get_session_dir_path()
    return folder


def _print_urls(base: str, ray_url: str, settings: AppSettings, console: Console) -> None:
    name = settings.tenants[0].name
    own, waiting = [], 0  # `own`: not always where the settings say
    with contextlib.suppress(OSError, ValueError):
        status = fetch_status(base)
        name = next((t["name"] for t in status["tenants"] if t["state"] == "ready"), name)
        waiting = (status["scheduler"].get("native_kernels") or {}).get("waiting", 0)
        if port := status["scheduler"].get("metrics_port"):
            own = [("of the scheduler's node", f"http://127.0.0.1:{port}/metrics")]
    console.print()
    for text, url in (
        ("plain route", f"POST {base}/tenants/{name}"),
        ("Open Inference Protocol", f"POST {base}/v2/models/{name}/infer"),
        ("status", f"coissue status --url {base}, or {base}/status"),
        ("metrics", f"{base}/metrics"), *own,
        ("timeline", f"coissue trace FILE --url {base}"),
        ("in Ray's words", _show_command(ray_url)), ("logs", f"{_session_folder()}/logs"),
        ("for `serve run`", f"RAY_ADDRESS={_gcs_address()}"),
    ):  # fmt: skip
        console.print(f"{text:>24}  {url}", highlight=False, soft_wrap=True)
    if waiting:
        console.print(f"Faster code is being compiled meanwhile, kernels to go: {waiting}.")
    console.print("Ctrl-C ends it.")
