"""The command line `coissue`. Errors are lines with what is wrong; Ray only inside `up`."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table

from coissue.deployments.config_file import ConfigError, find_missing, load_app_config
from coissue.deployments.discovery import choose_serve_flags
from coissue.deployments.settings import AppSettings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
#: What is read by a program, or by `grep`, is not wrapped at the 80 columns of no terminal.
console = Console(width=None if sys.stdout.isatty() else 200)
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.yaml", help="A Serve config.")]
Url = Annotated[str, typer.Option(help="Where the application is served.")]
#: More of an error is not shown.
LINE_CHARS = 2000
COLORS = {"ready": "green", "failed": "red"}


def fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


def explain_error(error: Exception, file: Path | None = None) -> str:
    """One line of moderate length, with the file before it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or file}: {error.strerror}"
    text = "not UTF-8" if isinstance(error, UnicodeDecodeError) else " ".join(str(error).split())
    return f"{file}: {text}"[:LINE_CHARS] if file else text[:LINE_CHARS]


def load(path: Path) -> tuple[dict[str, Any], AppSettings]:
    try:
        return load_app_config(path)
    except ConfigError as error:
        fail(str(error))


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coissue {metadata.version('coissue')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Serve many tenants' models on few devices."""


@app.command()
def validate(file: ConfigFile, strict: bool = False) -> None:
    """Check a config without running any of it. What it names and is not here is a warning, because
    the cluster may have it; --strict makes it an error."""
    config, settings = load(file)
    missing = find_missing(config, settings)
    for line in missing:
        typer.echo(f"{file}: {'' if strict else 'warning: '}{line}", err=True)
    if strict and missing:
        raise typer.Exit(1)
    typer.echo(f"ok: {len(settings.tenants)} tenant{'s' * (len(settings.tenants) > 1)}")


@app.command()
def up(
    file: ConfigFile,
    haproxy: Annotated[
        bool, typer.Option(help="HAProxy in front (fast; its statistics are open to all).")
    ] = True,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="A Ray cluster that runs already; without it, a Ray of its own is started.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="In place of http_options.port.")
    ] = None,
) -> None:
    """Serve a config in the foreground until Ctrl-C.

    In a cluster that runs already (--address) the applications of others stay as they are, names
    and routes they have are refused, and HTTP is where Serve of that cluster listens.
    """
    config, settings = load(file)
    if port is not None:
        config["http_options"] = {**config.get("http_options", {}), "port": port}
    address = None if address == "local" else address
    from coissue.deployments.cli.cluster import UpError
    from coissue.deployments.cli.up import serve_until_interrupted

    try:
        serve_until_interrupted(config, settings, haproxy=haproxy, address=address, console=console)
    except UpError as error:
        fail(str(error))


@app.command()
def flags() -> None:
    """Print the environment of nodes for `serve deploy`: eval "$(coissue flags)"; ray start ..."""
    for name, value in choose_serve_flags().items():
        typer.echo(f"export {name}={value}")


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="Where it is written.")],
    url: Url = "http://127.0.0.1:8000",
) -> None:
    """Save the timeline of a running application: its last launches and requests."""
    try:
        data = fetch(url.rstrip("/") + "/timeline", 60.0)
        count = len(json.loads(data)["traceEvents"])
        file.write_bytes(data)
    except urllib.error.URLError as error:
        fail(f"{url}: no timeline: {error.reason}")
    except OSError as error:
        fail(explain_error(error, file))
    except (ValueError, LookupError, TypeError) as error:
        fail(f"{url}: no timeline: {error}")
    typer.echo(f"{file}: {count} events; open it in https://ui.perfetto.dev")


@app.command()
def status(url: Url = "http://127.0.0.1:8000") -> None:
    """Show the tenants of a running application. Exit status 1: the config deployed last does not
    run, or there is no scheduler."""
    try:
        answer = fetch_status(url)
    except (OSError, ValueError) as error:
        elsewhere = " (elsewhere: --url)" if isinstance(error, OSError) else ""
        fail(f"{url}: no status: {getattr(error, 'reason', error)}{elsewhere}")
    console.print(status_table(answer["tenants"]))
    said = str(answer.get("deploy_error", ""))
    show_deploy_error(said, console)
    if isinstance(answer.get("scheduler"), dict) and "error" in answer["scheduler"]:
        fail(f"scheduler: {answer['scheduler']['error']}")
    if said:
        raise typer.Exit(1)


@app.command()
def explain(
    model: Annotated[
        str, typer.Argument(help="pkg.mod:callable, a saved program or a config.", metavar="MODEL")
    ],
    tenant: Annotated[str | None, typer.Argument(help="Of the config, if it has several.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Whose kernels.")] = "cpu",
    units: Annotated[
        int | None, typer.Option(help="Rows or tokens of a CUDA launch; 64 if not given.", min=1)
    ] = None,
    source: Annotated[bool, typer.Option(help="Print what is generated, too.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Where the graphs are drawn.")] = None,
    tune: Annotated[
        float,
        typer.Option(
            help="Time single ops first; kept for later.", min=0, max=86_400, metavar="SECONDS"
        ),
    ] = 0,
) -> None:
    """Show what is generated for a model's memory-bound ops and recurrences, and why not more."""
    from coissue.deployments.captures import TenantFailed
    from coissue.deployments.cli import explain as explaining
    from coissue.kernels.stitch.explain import render_svg

    progress = Console(stderr=True)
    try:
        if device == "cuda" and tune:
            raise ValueError("--tune: this CPU is timed, for --device cpu only")
        if device == "cpu" and units is not None:
            raise ValueError("--units: for --device cuda only; a CPU takes one after the other")
        if svg is not None and (svg.is_dir() or not svg.parent.is_dir()):
            raise ValueError(f"--svg: {str(svg)!r} is a folder, or in none")
        found, capture, machine, scheduler = explaining.find_model(model, tenant)
        units = units or explaining.UNITS[device]
        before, lowered = explaining.capture(found, capture, scheduler)
        with explaining.open_times(machine, tune) as times:
            parts = explaining.explain_parts(lowered, device, units, progress, times)
        if times is not None and tune:
            progress.print(f"{times.misses} ops timed", highlight=False)
        if svg is not None:
            svg.write_text(render_svg([one.picture for one in parts]))
    except ConfigError as error:
        fail(str(error))
    except (ValueError, OSError, TenantFailed) as error:
        fail(explain_error(error, Path(model)))
    for line in explaining.describe(before, lowered, parts, device):
        typer.echo(line)
    for text in explaining.describe_sources(parts, device) if source else ():
        typer.echo(text)


@app.command()
def simulate(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE.yaml]", help="A mix.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="One run each, or `all`; else the mix's.")
    ] = None,
    load: Annotated[
        list[float] | None, typer.Option(help="Share of what perfect packing could do; repeat it.")
    ] = None,
    seed: int = 0,
    costs: Annotated[
        Path | None, typer.Option(help="A measured cost table (costs.json of a device's cache).")
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Check every invariant after every turn: far slower.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="All figures.")] = None,
    plots: Annotated[Path | None, typer.Option(help="A folder for SVG plots.")] = None,
) -> None:
    """Run a mix of tenants on simulated devices, with the product's own scheduler.

    The table has a row per policy and load (1: as much as perfect packing
    could do). asked: requests; in time: of all asked but those that were
    cancelled; worst: the same, of the tenant with the least; good/s: in time,
    a second; p50, p99: of completed ones; busy: of the devices' time; members:
    requests per launch.
    """
    from coissue.deployments.cli import simulate as simulation

    try:
        mix = simulation.load_mix(file)
        mixes = simulation.vary(mix, policy or [], load or [])
        measured = simulation.MeasuredCosts(costs) if costs else None
        if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
            raise ValueError(f"--json: {str(json_file)!r} is a folder, or in none")
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
        runs = simulation.run_all(mixes, seed, measured, console, check=check)
        if json_file is not None:
            json_file.write_text(json.dumps(runs, indent=1) + "\n")
        if plots is not None:
            simulation.write_plots(runs, plots)
    except RecursionError:
        fail(f"{file or costs}: nested too deeply")
    except (ValueError, OSError) as error:
        fail(explain_error(error))
    console.print(simulation.render_table(runs))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="What `scheduler.record_to` wrote.")],
    check: Annotated[
        bool, typer.Option(help="Check every invariant after every turn: far slower.")
    ] = False,
) -> None:
    """Feed a recorded run to a fresh scheduler core: it must decide the same, turn by turn."""
    from coissue.scheduler import recording

    try:
        with file.open() as lines:
            stats = recording.replay(lines, check=check).stats()
            is_cut = not file.read_bytes().endswith(b"\n")
    except (OSError, UnicodeDecodeError, recording.ReplayError) as error:
        fail(explain_error(error, file))
    outcomes = (f"{count} {outcome.value}" for outcome, count in stats.outcomes.items())
    typer.echo(f"the same commands throughout: {', '.join(outcomes)}")
    if is_cut:
        typer.echo("The last line is cut, so the recording ended in the middle; it was left out.")


def fetch(url: str, timeout_s: float) -> bytes:
    """`GET url`. Raises `OSError` or `ValueError`."""
    parts = urllib.parse.urlsplit(url)
    _ = parts.port  # a `ValueError` where `int` would take 1_0
    if parts.scheme not in ("http", "https"):
        raise ValueError("a URL begins with http://")
    request = urllib.request.Request(url, headers={"accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise ValueError(f"HTTP {error.code}") from None
    except http.client.HTTPException:
        raise ValueError("what listens there does not speak HTTP") from None


def fetch_status(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """`GET /status`. Raises `OSError` or `ValueError`."""
    data = fetch(url.rstrip("/") + "/status", timeout_s)
    try:
        answer = json.loads(data)
    except ValueError:
        raise ValueError("this is not coissue") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("tenants"), list):
        raise ValueError("this is not coissue")
    return answer


def status_table(tenants: list[dict[str, Any]]) -> Group:
    """A row per tenant, and below the table why some are not as they should be."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tenant", overflow="fold")
    table.add_column("version", justify="right")
    table.add_column("state")
    for figure in ("SLO", "requests", "in time", "p99"):
        table.add_column(figure, justify="right", no_wrap=True)
    table.add_column("handler", overflow="fold")
    reasons = []
    for tenant in tenants:
        name, state = show_plain(str(tenant.get("name", ""))), str(tenant.get("state", ""))
        deadline, reason = tenant.get("deadline_ms"), tenant.get("reason")
        table.add_row(
            name,
            str(tenant.get("version", "")),
            f"[{COLORS.get(state, 'yellow')}]{show_plain(state)}",
            _format("{:g} ms", deadline),
            _format("{:.0f}", tenant.get("requests")),
            _format("{:.2%}", tenant.get("in_time")),
            _format("{:.4g} ms", tenant.get("p99_ms")),
            show_plain(str(tenant.get("handler", ""))),
        )
        if reason:
            reasons.append(f"{name}: {show_plain(str(reason))}")
    return Group(table, *reasons)


def _format(form: str, value: Any) -> str:
    return form.format(value) if isinstance(value, int | float) else ""


def show_deploy_error(said: str, console: Console) -> None:
    lines = said.strip().splitlines()
    for line in ["The config deployed last does not run:", *lines] if lines else ():
        console.print(show_plain(line), highlight=False, soft_wrap=True)


def show_plain(text: str) -> str:
    """A tenant's own words: neither markup nor control characters reach the terminal."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain.replace("[", r"\[")
