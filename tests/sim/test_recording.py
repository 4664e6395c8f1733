"""Recorded runs give the same commands on a fresh core; anything else is told with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from coissue.scheduler.core import Core
from coissue.scheduler.null_device import LinearCost
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.recording import Recorder, ReplayError, replay
from coissue.scheduler.simulation import Scenario, simulate
from load_tests.sim.drawn import LearningCost, draw_scenario


def record(scenario: Scenario, seed: int) -> list[str]:
    """The lines of a simulated run on one device whose costs are learned."""
    lines: list[str] = []
    scenario = replace(scenario, devices=1, check=False)
    recorder = Recorder(
        lines.append, LearningCost(), limits=scenario.limits, policy=scenario.policy, seed=seed
    )
    simulate(
        scenario, seed, cost=recorder, true_cost=LinearCost(60_000, 12_000), record=recorder.record
    )
    return lines


@pytest.mark.parametrize("seed", range(25))
def test_a_replay_gives_the_same_commands(seed, monkeypatch):
    # The simulator's core draws from a stream of its own; the recording names the seed of `Random`.
    monkeypatch.setattr("coissue.scheduler.simulation.engine._Run._random", _plain_random)
    lines = record(draw_scenario(seed), seed)
    core = replay(lines, check=True)
    assert core.stats().requests_open == 0
    assert sum(core.stats().outcomes.values()) > 0


def _plain_random(run, purpose: str) -> Random:
    return Random(run._seed) if purpose == "core" else Random(f"{run._seed}/{purpose}")


def test_every_policy_is_among_the_replayed_seeds():
    assert {draw_scenario(seed).policy for seed in range(25)} == set(POLICIES)


def test_a_core_that_decides_otherwise_is_found_at_its_line(monkeypatch):
    lines = record(draw_scenario(1), 1)
    number = next(n for n, line in enumerate(lines) if '"Launch"' in line)
    turn = json.loads(lines[number])
    launch = next(command for command in turn["commands"] if command[0] == "Launch")
    launch[5] += 1
    lines[number] = json.dumps(turn)
    with pytest.raises(ReplayError, match=f"line {number + 1}: command"):
        replay(lines)
    turn["commands"].append(["Free", 1])
    turn["commands"].remove(launch)
    lines[number] = json.dumps(turn)
    with pytest.raises(ReplayError, match=f"line {number + 1}"):
        replay(lines)


def test_a_core_that_asks_otherwise_is_found(monkeypatch):
    lines = record(draw_scenario(1), 1)
    stripped = [json.dumps({**json.loads(line), "predicted": []}) for line in lines[1:]]
    with pytest.raises(ReplayError, match=r"line .*prediction that was not made"):
        replay([lines[0], *stripped])


def test_a_turn_that_broke_the_core_breaks_its_replay(monkeypatch):
    lines = record(draw_scenario(1), 1)
    last = json.loads(lines[-1])
    last["events"][-1][1] = 0  # the time goes back
    with pytest.raises(ReplayError, match=rf"line {len(lines) + 1}: event times"):
        replay([*lines, json.dumps(last)])


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["not json"],
        ["{}"],
        ['{"coissue_recording": 99, "policy": "space_time", "seed": 0, "limits": {}}'],
        ['{"coissue_recording": 2, "policy": "space_time", "seed": 0, "limits": {"windw": 3}}'],
    ],
)
def test_what_is_no_recording_is_refused(lines):
    with pytest.raises(ReplayError, match="line 1"):
        replay(lines)


def test_a_recording_that_ends_in_the_middle_of_a_line_is_replayed_up_to_there(monkeypatch):
    monkeypatch.setattr("coissue.scheduler.simulation.engine._Run._random", _plain_random)
    lines = record(draw_scenario(3), 3)
    assert replay([*lines[:40], lines[40][:-5]]).stats() == replay(lines[:40]).stats()
    with pytest.raises(ReplayError, match="line 41: not what"):
        replay([*lines[:40], lines[40][:-5] + "\n", *lines[41:]])


@pytest.mark.parametrize(
    ("key", "value"), [("policy", "none of ours"), ("policy", []), ("seed", {})]
)
def test_a_first_line_that_names_nothing_of_ours_is_refused(key, value):
    head, *rest = record(draw_scenario(0), 0)
    with pytest.raises(ReplayError, match="line 1: not what"):
        replay([json.dumps({**json.loads(head), key: value}), *rest])


@pytest.mark.parametrize("event", [["Submited", 1], ["Woke"], ["Woke", 1, 2], ["Woke", "now"], 3])
def test_an_event_that_is_none_is_refused_with_its_line(event):
    head = record(draw_scenario(1), 1)[0]
    with pytest.raises(ReplayError, match="line 2: not what `scheduler"):
        replay([head, json.dumps({"events": [event], "commands": []})])


def test_the_core_needs_the_recorded_limits():
    head = json.loads(record(draw_scenario(1), 1)[0])
    core = replay([json.dumps(head)])
    assert isinstance(core, Core)
    assert core.limits == draw_scenario(1).limits
