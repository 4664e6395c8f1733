"""The demo's traffic: one payload per test item, rates per tenant, and the reading of answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from load_tests.client import Answer, Payload, Schedule, plan_poisson
from load_tests.demo import data

#: Shares of the text traffic; those that are not text add this many requests/s each.
TEXT_SHARES = {
    "sentiment": 4, "spam": 3, "topic": 3, "urgency": 2, "language": 2, "question": 2,
}  # fmt: skip
SMALL_RPS = {
    "digits-wide": 12.0, "digits-deep": 8.0, "digits-lstm": 6.0,
    "iris": 10.0, "wine": 6.0, "breast-cancer": 6.0,
}  # fmt: skip
SEED = 11


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of the answers that came, and of the eager module on the same items."""

    answers: float
    eager: float
    #: Answers that name another class than the eager module.
    differing: int
    count: int


def build_payloads() -> dict[str, list[Payload]]:
    """Tenant -> one payload per item of its test set, in order."""
    payloads = {}
    for task in data.TEXT_TASKS:
        payloads[task] = [
            Payload(f"/tenants/{task}", json.dumps({"text": text}).encode(), "application/json")
            for text, _ in data.read_texts(task).test
        ]
    for task in data.DIGIT_TASKS + data.TABLE_TASKS + data.SEQUENCE_TASKS:
        payloads[task] = [
            Payload(f"/tenants/{task}", np.ascontiguousarray(row, np.float32).tobytes())
            for row in data.read_arrays(task).test_x
        ]
    return payloads


def plan(text_rps: float, seconds: float, part: int, tenants: Iterable[str]) -> Schedule:
    """Part number `part` of the mixed schedule, for those of the twelve that are in `tenants`."""
    total = sum(TEXT_SHARES.values())
    rates = {task: text_rps * share / total for task, share in TEXT_SHARES.items()} | SMALL_RPS
    served = set(tenants)
    rates = {task: rate for task, rate in rates.items() if task in served}
    items = {task: len(payloads) for task, payloads in build_payloads().items()}
    return plan_poisson(rates, items, seconds, SEED + part)


def read_class(task: str, body: bytes, labels: list[str]) -> int:
    """The class an answer names: the handler's label, or the largest of the raw logits."""
    if task in data.TEXT_TASKS:
        return labels.index(json.loads(body)["label"])
    return int(np.frombuffer(body, np.float32).argmax())


def judge_answers(task: str, answers: Iterable[Answer], eager: Mapping[str, Any]) -> Accuracy:
    """Compares with the labels and with what the eager module said of the same items."""
    items = [(read_class(task, a.body, eager["labels"]), a.shot.item) for a in answers if a.is_ok]
    if not items:
        return Accuracy(float("nan"), float("nan"), 0, 0)
    targets, said = eager["targets"], eager["predictions"]
    return Accuracy(
        answers=float(np.mean([given == targets[item] for given, item in items])),
        eager=float(np.mean([said[item] == targets[item] for _, item in items])),
        differing=sum(given != said[item] for given, item in items),
        count=len(items),
    )
