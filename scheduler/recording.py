"""Recording a run of the core, turn by turn, and replaying it on a fresh core.

    Recorder (a CostView and a hook of the runtime) -> lines of JSON -> replay, read_run

The first line holds what the core was made of; every other line one turn: its events, its commands,
and what was predicted in it. Predictions are part of the input, since the cost table learns and is
measured at attach: each answer that differs from the last one for the same question is written with
the number of the call in the turn, so a replay gives the same answers at the same places. No I/O
here: whoever records gives a function that takes lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Final, cast, final

from coissue.scheduler import messages
from coissue.scheduler.core import Core
from coissue.scheduler.messages import Attached, Command, Event, SignatureId
from coissue.scheduler.plain import PlainError, from_plain, to_plain
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import CoreLimits, CostView, InvariantViolation

VERSION: Final = 3
_EVENTS: Final = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, Event)
}
#: (signature, units, segments, weight sets, whether it joins).
_Question = tuple[int, int, int, int, int]


class ReplayError(Exception):
    """The lines are no recording, or a fresh core decides otherwise: the line and what differs."""


@final
class Recorder:
    """The cost view that the recorded core is given, and what is told each turn."""

    def __init__(
        self,
        write: Callable[[str], object],
        cost: CostView,
        *,
        limits: CoreLimits,
        policy: str,
        seed: int = 0,
        name: Callable[[SignatureId], str] = str,
    ) -> None:
        """`name`: of a signature, for the lines of tenants. The core must be made with
        `Random(seed)`."""
        self._write = write
        self._cost = cost
        self._name = name
        self._known: dict[_Question, int] = {}
        self._calls = 0
        self._changes: list[list[int]] = []
        head = {"coissue_recording": VERSION, "policy": policy, "seed": seed}
        write(json.dumps(head | {"limits": to_plain(limits)}) + "\n")

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        question = (signature, units, segments, sets, int(joins))
        answer_ns = self._cost.predict_ns(signature, units, segments, sets, joins)
        if self._known.get(question) != answer_ns:
            self._known[question] = answer_ns
            self._changes.append([self._calls, *question, answer_ns])
        self._calls += 1
        return answer_ns

    def observe_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, took_ns: int,
        joins: bool,
    ) -> None:  # fmt: skip
        self._cost.observe_ns(signature, units, segments, sets, took_ns, joins)

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """One turn, after it."""
        line: dict[str, object] = {"events": encode(events), "commands": encode(commands)}
        if self._changes:
            line["predicted"] = self._changes
        attached = [event.tenant for event in events if isinstance(event, Attached)]
        if attached:
            used = dict.fromkeys(k.signature for spec in attached for k in spec.kernels)
            line["names"] = {str(signature): self._name(signature) for signature in used}
        self._write(json.dumps(line, separators=(",", ":")) + "\n")
        self._calls, self._changes = 0, []


def encode(messages: Iterable[Event | Command]) -> list[list[object]]:
    """Each as its class and its fields in their order."""
    return [
        [type(message).__name__, *[to_plain(getattr(message, f.name)) for f in fields(message)]]
        for message in messages
    ]


def _decode(item: list[object]) -> Event:
    kind = _EVENTS[str(item[0])]
    names = [field.name for field in fields(kind)]
    return from_plain(kind, dict(zip(names, item[1:], strict=True)), kind.__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    line: int
    events: list[Event]
    commands: list[list[object]]
    predicted: list[list[int]]
    names: dict[str, str]


def read_turns(lines: Iterable[str]) -> Iterator[tuple[str, CoreLimits, int] | Turn]:
    """What the core was made of, then the turns."""
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if number == 1:
                if line["coissue_recording"] != VERSION:
                    raise ValueError("another version's recording")
                policy, seed = line["policy"], line["seed"]
                if policy not in POLICIES or not isinstance(seed, int):
                    raise ValueError("no policy or seed of ours")
                yield policy, from_plain(CoreLimits, line["limits"]), seed
                continue
            events = [_decode(item) for item in line["events"]]
            predicted, names = line.get("predicted", []), line.get("names", {})
            if not isinstance(line["commands"], list) or not all(map(_is_answer, predicted)):
                raise ValueError("not as `Recorder` writes them")
            yield Turn(number, events, line["commands"], predicted, names)
        except (PlainError, ValueError, LookupError, TypeError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and number > 1 and text[-1:] != "\n":
                return  # the process ended while it wrote this line
            raise ReplayError(f"line {number}: not what `scheduler.record_to` writes") from None


def _is_answer(told: object) -> bool:
    """The number of the question, the question, and what it is answered with."""
    return isinstance(told, list) and len(told) == 7 and all(type(n) is int for n in told)


@final
class _Told:
    """Answers as was recorded."""

    def __init__(self) -> None:
        self._known: dict[_Question, int] = {}
        self._calls = 0
        self._changes: list[list[int]] = []

    def begin(self, turn: Turn) -> None:
        self._calls, self._changes = 0, turn.predicted[::-1]

    def predict_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, joins: bool = False
    ) -> int:
        if self._changes and self._changes[-1][0] == self._calls:
            _, *question, answer_ns = self._changes.pop()
            self._known[cast(_Question, tuple(question))] = answer_ns
        self._calls += 1
        asked = (signature, units, segments, sets, int(joins))
        if asked not in self._known:
            raise ReplayError(f"asked for a prediction that was not made: {asked}")
        return self._known[asked]

    def observe_ns(
        self, signature: SignatureId, units: int, segments: int, sets: int, took_ns: int,
        joins: bool,
    ) -> None:  # fmt: skip
        """What was learned shows in the answers."""


def replay(lines: Iterable[str], *, check: bool = False) -> Core:
    """Feeds the recorded events to a fresh core; the core at the end.

    Raises ReplayError at the first turn whose commands differ, or that breaks an invariant (those
    that cost much are looked at with `check`).
    """
    told, core = _Told(), None
    for turn in read_turns(lines):
        if not isinstance(turn, Turn):
            policy, limits, seed = turn
            core = Core(limits, policy, told, Random(seed))
            continue
        assert core is not None
        told.begin(turn)
        try:
            commands = encode(core.handle(*turn.events))
            if check:
                core.check()
        except (ReplayError, InvariantViolation) as error:
            raise ReplayError(f"line {turn.line}: {error}") from None
        if commands != turn.commands:
            raise ReplayError(f"line {turn.line}: {_difference(commands, turn.commands)}")
        core.trace.take()
    if core is None:
        raise ReplayError("line 1: the recording is empty")
    return core


def _difference(now: list[list[object]], then: list[list[object]]) -> str:
    for index, (mine, theirs) in enumerate(zip(now, then, strict=False)):
        if mine != theirs:
            return f"command {index} is {mine}, was {theirs}"
    return f"{len(now)} commands, there were {len(then)}"
