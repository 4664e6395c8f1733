"""A live scheduler's recording: a fresh core gives the same commands, and the simulator runs it."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.channel.client import SchedulerClient
from coissue.deployments.cli.main import app
from coissue.deployments.costs import Costs
from coissue.deployments.host import SchedulerHost
from coissue.deployments.settings import AppSettings
from coissue.scheduler.recording import ReplayError, replay
from coissue.scheduler.simulation import simulate
from load_tests.sim.recorded import make_scenario, read_run

TENANTS = {"head-a": 1, "head-b": 2}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """The file of a run with two tenants, a policy switched in between, and the cost table."""
    root = tmp_path_factory.mktemp("recording")
    settings = AppSettings.model_validate(
        {
            "device": {"memory_mib": 256, "cache": str(root / "cache"), "native_kernels": False},
            "scheduler": {"metrics_port": None, "record_to": str(root / "run.jsonl")},
            "slo_classes": {"fast": {"deadline_ms": 5000}},
            "tenants": [
                {
                    "name": name,
                    "model": {"factory": "tiny_models:headed", "kwargs": {"seed": seed}},
                    "slo": "fast",
                }
                for name, seed in TENANTS.items()
            ],
        }
    )
    host = SchedulerHost(settings, str(root))
    host.start()
    try:
        for tenant in settings.tenants:
            capture(tenant.model, tenant.limits, tenant.name).save(root / tenant.name)
            assert host.attach(tenant.model_dump(), 1, str(root / tenant.name)) == ""
        asyncio.run(ask(host))
    finally:
        host.stop()
    return root / "run.jsonl", host.costs.table


async def ask(host: SchedulerHost) -> None:
    client = await SchedulerClient.connect(host.endpoint)
    await client.wait_ready(*TENANTS, timeout_s=30)
    for number, policy in enumerate(("space_time", "time_only", "space_time")):
        host.set_policy(policy)
        inputs = {"input": np.ones((1 + number, 32), np.float32)}
        await asyncio.gather(*(client.infer(name, inputs) for name in [*TENANTS] * 10))
        late = client.infer("head-a", inputs, budget_ns=1)
        await asyncio.gather(late, return_exceptions=True)
    await client.close()


def test_a_live_run_is_replayed_event_by_event(recording):
    with recording[0].open() as lines:
        core = replay(lines, check=True)
    outcomes = {outcome.value: count for outcome, count in core.stats().outcomes.items()}
    assert outcomes["completed"] == 60
    assert outcomes["rejected"] + outcomes["expired"] == 3


def test_the_command_line_replays(recording, tmp_path):
    made = CliRunner().invoke(app, ["replay", str(recording[0]), "--check"])
    assert made.exit_code == 0, made.output
    assert "60 completed" in made.output
    (tmp_path / "run.jsonl").write_text("{}")
    made = CliRunner().invoke(app, ["replay", str(tmp_path / "run.jsonl")])
    assert made.exit_code == 1
    assert "run.jsonl: line 1: not what `scheduler.record_to` writes" in made.output


def test_a_changed_event_is_noticed(recording):
    lines = recording[0].read_text().splitlines()
    turns = [json.loads(line) for line in lines]
    number = next(
        n for n, turn in enumerate(turns[1:], 1)
        if any(event[0] == "Submitted" for event in turn["events"])
    )  # fmt: skip
    next(event for event in turns[number]["events"] if event[0] == "Submitted")[4] += 7  # rows
    lines[number] = json.dumps(turns[number])
    with pytest.raises(ReplayError, match=f"line {number + 1}"):
        replay(lines)


def test_a_recorded_run_is_simulated_with_its_costs(recording):
    path, table = recording
    with path.open() as lines:
        run = read_run(lines)
    assert {name[:7] for name in run.specs} == {"head-a", "head-b"}
    costs = Costs(table, learns=False)
    assert [costs.intern(run.names[n]) for n in sorted(run.names)] == sorted(run.names)
    report = simulate(make_scenario(run, run, costs), 0, cost=costs)
    done = sum(own.outcomes.total() for own in report.tenants.values())
    assert done == len(run.submitted) == 63
    assert len(run.latencies_ns) == 60
    assert run.flown
    assert all(own.done_ns >= own.decided_ns + own.measured_ns for own in run.flown)
