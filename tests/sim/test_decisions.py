"""The core's commands over whole runs are those that were recorded: work on its speed changes none.

`decisions.json` holds the number of turns and a digest of all commands per run. A change that is
meant to decide otherwise says so in its commit, and writes the file anew:

    PYTHONPATH=. python tests/sim/test_decisions.py

To see what differs: `coissue replay` on a recording that was made before the change.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from coissue.scheduler.null_device import LinearCost
from coissue.scheduler.ports import MS
from coissue.scheduler.recording import encode
from coissue.scheduler.simulation import Scenario, simulate
from load_tests.sim.drawn import LearningCost, draw_scenario

PATH = Path(__file__).with_name("decisions.json")
SEEDS = range(24)


def crowded(seed: int) -> Scenario:
    """`space_time` with four times the requests, whose kernels may run in parts of rows."""
    scenario = draw_scenario(seed)
    tenants = [
        replace(
            tenant,
            rate_hz=4 * tenant.rate_hz,
            rows=(1, 40),
            spec=replace(
                tenant.spec,
                kernels=tuple(replace(kernel, splittable=True) for kernel in tenant.spec.kernels),
            ),
        )
        for tenant in scenario.tenants
    ]
    return replace(scenario, tenants=tuple(tenants), policy="space_time", duration_ns=60 * MS)


def decide(name: str) -> list[int | str]:
    """Turns, and the digest of their commands."""
    kind, number = name.split(" ")
    seed, turns, digest = int(number), 0, hashlib.sha256()
    scenario = crowded(seed) if kind == "crowded" else draw_scenario(seed)

    def record(events, commands):
        nonlocal turns
        turns += 1
        digest.update(json.dumps(encode(commands)).encode())

    simulate(
        replace(scenario, devices=1, check=False),
        seed,
        cost=LearningCost() if kind == "learned" else None,
        true_cost=LinearCost(60_000, 12_000) if kind == "learned" else None,
        record=record,
    )
    return [turns, digest.hexdigest()[:16]]


NAMES = [f"{kind} {seed}" for kind in ("drawn", "learned", "crowded") for seed in SEEDS]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_gives_the_recorded_commands(name):
    assert decide(name) == json.loads(PATH.read_text())[name]


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(decide(name))}" for name in NAMES]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
