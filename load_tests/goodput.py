"""Goodput: the highest open-loop rate at which the 99th percentile of latency keeps a limit.

A request that is not answered with 200 counts as infinitely late. The search is a generator of
rates, so that several systems can be searched in turns, probe by probe, in one run: what else the
machine does then hits all of them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import uvloop

from load_tests.client import LoadResult, Payload, percentile, plan_poisson, run_load

P99_MS_LIMIT = 50.0
#: Rates are searched down to this relative step.
STEP = 1.08
PROBES_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Probe:
    rate: float
    p50_ms: float
    p99_ms: float
    ok_share: float
    lag_ms: float

    @property
    def passed(self) -> bool:
        return self.p99_ms <= P99_MS_LIMIT


@dataclass(frozen=True, slots=True)
class Target:
    """A system under load: equal traffic to each of its tenants."""

    name: str
    port: int
    payloads: Mapping[str, Sequence[Payload]]


def measure(target: Target, rate: float, seconds: float, seed: int) -> Probe:
    """One open-loop run at `rate` requests/s over all tenants; the first fifth is warm-up."""
    rates = dict.fromkeys(target.payloads, rate / len(target.payloads))
    items = {tenant: len(payloads) for tenant, payloads in target.payloads.items()}
    schedule = plan_poisson(rates, items, seconds, seed)
    result = uvloop.run(run_load(schedule, target.payloads, port=target.port, drain_s=3.0))
    return judge(result, rate, warm_ns=int(seconds * 0.2e9))


def judge(result: LoadResult, rate: float, warm_ns: int) -> Probe:
    counted = [answer for answer in result.answers if answer.shot.at_ns >= warm_ns]
    latencies = [a.latency_ns / 1e6 if a.is_ok else math.inf for a in counted]
    return Probe(
        rate=rate,
        p50_ms=percentile(latencies, 50),
        p99_ms=percentile(latencies, 99),
        ok_share=sum(a.is_ok for a in counted) / max(len(counted), 1),
        lag_ms=result.lag_ms_p99,
    )


def search(start: float, limit: float) -> Generator[float, bool, float]:
    """Yields rates to probe, is sent whether each passed, returns the highest that did (0: none).

    Doubles or halves from `start` until the edge lies between two probes, then halves that
    interval (in logarithm) until it is narrower than `STEP`.
    """
    low, high = 0.0, math.inf
    rate = start
    for _ in range(PROBES_LIMIT):
        if (yield rate):
            low = max(low, rate)
        else:
            high = min(high, rate)
        if low >= limit or (low and high / low <= STEP) or (not low and high < 2):
            break
        rate = choose_next(low, high, limit)
    return low


def choose_next(low: float, high: float, limit: float) -> float:
    if not low:
        return high / 2
    if math.isinf(high):
        return min(low * 2, limit)
    return math.sqrt(low * high)


def compare(
    targets: Sequence[Target],
    starts: Mapping[str, float],
    limit: float,
    probe: Callable[[Target, float], Probe],
    report: Callable[[str, Probe], None] = lambda name, probe: None,
) -> dict[str, tuple[float, list[Probe]]]:
    """Search all targets in turns. name -> (goodput in requests/s, its probes).

    A rate fails when it failed twice in a row, so that one hiccup of the machine does not decide.
    """
    found: dict[str, tuple[float, list[Probe]]] = {}
    running = [(target, search(starts[target.name], limit), []) for target in targets]
    rates = {target.name: next(steps) for target, steps, _ in running}
    while running:
        for entry in tuple(running):
            target, steps, probes = entry
            for _ in range(2):
                probes.append(probe(target, rates[target.name]))
                report(target.name, probes[-1])
                if probes[-1].passed:
                    break
            try:
                rates[target.name] = steps.send(probes[-1].passed)
            except StopIteration as done:
                found[target.name] = (done.value, probes)
                running.remove(entry)
    return found
