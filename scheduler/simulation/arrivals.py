"""Arrivals: when a tenant's requests come and how large they are, drawn lazily from its own stream.

NOTE. Each tenant has a `Random` of its own, so one tenant's requests are the same whatever the
others do. Gaps are gamma-distributed with the wanted coefficient of variation; in bursts they are
exponential at the rate that gives the tenant's mean over on and off times; a trace is scaled to the
rate, begun anywhere and repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from random import Random

from coissue.scheduler.messages import RequestId, Submitted
from coissue.scheduler.simulation.scenario import SECOND, SimTenant, Traffic


def draw_times(traffic: Traffic, rate_hz: float, duration_ns: int, rng: Random) -> Iterator[int]:
    """Rising times in ns from 0, all below `duration_ns`."""
    if rate_hz <= 0:
        return
    if traffic.trace_ns:
        times = _follow(traffic.trace_ns, rate_hz, rng)
    elif traffic.on_ns:
        times = _burst(traffic, rate_hz, duration_ns, rng)
    else:
        times = _space(traffic.cv, rate_hz, rng)
    for at_ns in times:
        if at_ns >= duration_ns:
            return
        yield round(at_ns)


def _space(cv: float, rate_hz: float, rng: Random) -> Iterator[float]:
    """A renewal process, begun in its middle: many tenants that begin with a gap of their own
    each would all be late at first when the gaps vary much."""
    shape = 1 / cv**2
    scale_ns = SECOND / (rate_hz * shape)
    # The gap that covers a random moment is longer than others: gamma with one more in its shape.
    at_ns = rng.random() * rng.gammavariate(shape + 1, scale_ns)
    while True:
        yield at_ns
        at_ns += rng.gammavariate(shape, scale_ns)


def _burst(traffic: Traffic, rate_hz: float, duration_ns: int, rng: Random) -> Iterator[float]:
    gap_ns = SECOND / rate_hz * traffic.on_ns / (traffic.on_ns + traffic.off_ns)
    is_on = rng.random() * (traffic.on_ns + traffic.off_ns) < traffic.on_ns
    at_ns = 0.0
    while at_ns < duration_ns:
        mean_ns = traffic.on_ns if is_on else traffic.off_ns
        end_ns = at_ns + (rng.expovariate(1 / mean_ns) if mean_ns else 0.0)
        while is_on and (at_ns := at_ns + rng.expovariate(1 / gap_ns)) < end_ns:
            yield at_ns
        at_ns, is_on = end_ns, not is_on


def _follow(trace_ns: tuple[int, ...], rate_hz: float, rng: Random) -> Iterator[float]:
    first_ns, span_ns = trace_ns[0], trace_ns[-1] - trace_ns[0]
    # The last time falls on the first one of the next round.
    times = [at_ns - first_ns for at_ns in trace_ns[:-1]]
    scale = SECOND * len(times) / span_ns / rate_hz
    start_ns = rng.random() * span_ns
    place, round_ns = bisect_right(times, start_ns), 0
    while True:
        if place == len(times):
            place, round_ns = 0, round_ns + span_ns
        yield (round_ns + times[place] - start_ns) * scale
        place += 1


def draw_requests(tenant: SimTenant, duration_ns: int, rng: Random) -> Iterator[Submitted]:
    """The tenant's requests; their numbers are to be given by the taker."""
    for at_ns in draw_times(tenant.traffic, tenant.rate_hz, duration_ns, rng):
        yield make_request(tenant, at_ns, rng)


def make_request(tenant: SimTenant, at_ns: int, rng: Random) -> Submitted:
    low, high = tenant.rows
    rows = low if low == high else rng.randint(low, high)
    low, high = tenant.tokens
    tokens = low if low == high else rng.randint(low, high)
    return Submitted(
        at_ns, RequestId(0), tenant.spec.name, rows, rows * tokens, at_ns + tenant.deadline_ns, 0,
        tenant.bytes_needed,
    )  # fmt: skip
