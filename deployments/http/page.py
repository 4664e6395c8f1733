"""`GET /status`: what each tenant does, as data and as a page. Everything shown is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from coissue.deployments.channel.frames import TenantInfo

STYLE: Final = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.4em .8em;"
    "border-bottom:1px solid #ddd}.ready{color:#07702f}.failed{color:#b3131b}"
    ".loading,.draining{color:#8a5a00}"
)
COLUMNS: Final = (
    ("tenant", "name"), ("version", "version"), ("state", "state"), ("SLO class", "slo_class"),
    ("deadline (ms)", "deadline_ms"), ("objective", "objective"), ("share", "share"),
    ("handler", "handler"), ("requests", "requests"), ("in time", "in_time"),
    ("p99 (ms)", "p99_ms"), ("reason", "reason"),
)  # fmt: skip
FIELDS: Final = (
    "name", "version", "state", "reason", "slo_class", "objective", "priority", "share",
    "in_flight_limit", "rows_limit", "tokens_limit",
)  # fmt: skip
#: The HELP and TYPE of a metric, and its samples.
_FAMILY: Final = re.compile(rb"(# HELP .*\n# TYPE .*\n)((?:[^#\n].*\n)*)")
_TENANT: Final = re.compile(rb'[{,]tenant="([^"]*)"')


#: Of a tenant since the scheduler began; see `SchedulerMetrics.summarize`.
FIGURES: Final = ("requests", "in_time", "p99_ms")


def status(
    tenants: Iterable[TenantInfo], scheduler: dict[str, Any], counts: Mapping[str, int],
    deploy_error: str = "",
) -> dict[str, Any]:  # fmt: skip
    """`scheduler` is its own status; `replica_answers` counts this replica's answers by reason;
    `deploy_error`: why Serve does not run the config that it was given last."""
    figures = scheduler.pop("figures", {})
    return {
        "tenants": [_describe(info, figures.get(info.name, {})) for info in tenants],
        "scheduler": scheduler,
        "replica_answers": dict(counts),
        "deploy_error": deploy_error,
    }


def _describe(info: TenantInfo, figures: Mapping[str, Any]) -> dict[str, Any]:
    handler = msgspec.json.decode(info.handler)["use"] if info.handler else ""
    return {
        **{key: getattr(info, key) for key in FIELDS},
        "deadline_ms": info.deadline_ns / 1e6,
        "handler": handler,
        **{key: figures.get(key) for key in FIGURES},
    }


def prefers_html(accept: bytes) -> bool:
    """Browsers name text/html first; API clients name JSON or anything."""
    html, json = accept.find(b"text/html"), accept.find(b"application/json")
    return html >= 0 and (json < 0 or html < json)


def render(status: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in COLUMNS)
    rows = "".join(_row(tenant) for tenant in status["tenants"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>coissue</title>'
        f"<style>{STYLE}</style></head><body><h1>coissue</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"{_warning(status['deploy_error'])}<h2>Scheduler</h2>{_facts(status['scheduler'])}"
        f"<h2>Answers of this replica</h2>{_facts(status['replica_answers'])}</body></html>"
    )


def _warning(deploy_error: str) -> str:
    said = f"The config deployed last does not run: {escape(deploy_error)}"
    return f'<p class="failed">{said}</p>' if deploy_error else ""


def _row(tenant: Mapping[str, Any]) -> str:
    cells = "".join(f"<td>{_text(tenant[key])}</td>" for _, key in COLUMNS)
    return f'<tr class="{_text(tenant["state"])}">{cells}</tr>'


def _facts(facts: Any) -> str:
    """A table of names and values; nested values as tables of their own."""
    if isinstance(facts, Mapping):
        rows = "".join(
            f"<tr><th>{_text(key)}</th><td>{_facts(value)}</td></tr>"
            for key, value in facts.items()
        )
        return f"<table>{rows}</table>"
    if isinstance(facts, list):
        return "<br>".join(_facts(item) for item in facts)
    return _text(facts)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def keep_metrics(text: bytes, tenants: frozenset[str]) -> bytes:
    """The metrics that carry one of `tenants` as a label, for an application of their own."""
    names, kept = {name.encode() for name in tenants}, []
    for head, samples in _FAMILY.findall(text):
        lines = samples.splitlines(keepends=True)
        own = [line for line in lines if (f := _TENANT.search(line)) and f[1] in names]
        kept += [head, *own] if own else []
    return b"".join(kept)


def keep_status(scheduler: Mapping[str, Any], tenants: frozenset[str]) -> dict[str, Any]:
    states = {name: state for name, state in scheduler["tenants"].items() if name in tenants}
    kept = {key: scheduler[key] for key in ("device", "policy", "figures")}
    return {**kept, "tenants": states}
