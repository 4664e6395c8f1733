"""Result files: figures with the machine, the versions and the command that gave them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from load_tests.demo.data import ROOT

#: Longer lists (single probes) are left to the JSON file.
LIST_LIMIT = 12
PACKAGES = ("ray", "torch", "numpy", "uvloop", "msgspec")


def describe_machine() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def describe_versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {"python": platform.python_version(), "commit": commit.stdout.strip(), **versions}


def write(folder: Path, name: str, found: Mapping[str, Any], *, seconds: float) -> Path:
    """<folder>/<date>-<name>.json and .md; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    spec = sys.modules["__main__"].__spec__
    document = {
        "name": name,
        "date": date,
        "command": " ".join(["python -m", spec.name if spec else "?", *sys.argv[1:]]),
        "seconds": round(seconds, 1),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "result": found,
    }
    path = folder / f"{date}-{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(document))
    return path


def flatten(found: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every figure by its path."""
    flat: dict[str, str] = {}
    for key, value in found.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            if len(value) > LIST_LIMIT:
                continue
            if any(isinstance(item, Mapping) for item in value):
                for index, item in enumerate(value):
                    facts = (f"{name} {show(fact)}" for name, fact in item.items())
                    flat[f"{prefix}{key}.{index}"] = ", ".join(facts)
            else:
                flat[f"{prefix}{key}"] = "; ".join(map(show, value))
        else:
            flat[f"{prefix}{key}"] = show(value)
    return flat


def show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else str(value)


def summarise(found: Mapping[str, Any]) -> str:
    """The figures of the first level, in one line."""
    plain = {k: v for k, v in found.items() if not isinstance(v, Mapping | list)}
    return ", ".join(f"{key}={show(value)}" for key, value in plain.items())


def render(document: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in document["versions"].items())
    rows = [f"| {key} | {value} |" for key, value in flatten(document["result"]).items()]
    return "\n".join(
        [
            f"# {document['name']}, {document['date']}",
            "",
            f"Command: `{document['command'].strip()}` ({document['seconds']} s).",
            f"Machine: {machine}.",
            f"Versions: {versions}.",
            "",
            "| figure | value |",
            "|---|---|",
            *rows,
            "",
        ]
    )
