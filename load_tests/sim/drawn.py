"""Scenarios drawn from a seed, with every kind of fault, for campaigns and tests."""

from __future__ import annotations

from random import Random

from coissue.scheduler.messages import KernelIndex, KernelSpec, SignatureId, TenantSpec, WeightsId
from coissue.scheduler.null_device import DeviceModel, LinearCost
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import MS, CoreLimits
from coissue.scheduler.simulation import Faults, Scenario, SimTenant, Traffic


class LearningCost:
    """Corrects itself by what it observes, as the measured table does."""

    def __init__(self) -> None:
        self._base = LinearCost(50_000, 10_000, 5000, join_unit_ns=4000)
        self._factor = 1.0

    def predict_ns(self, *size: int) -> int:
        return int(self._base.predict_ns(*size) * self._factor)

    def observe_ns(self, *seen: int) -> None:
        *size, took_ns, joins = seen
        self._factor += 0.1 * (took_ns / self._base.predict_ns(*size, joins) - self._factor)


def make_spec(name: str, signatures, weights: int, *, priority=1, limit=256) -> TenantSpec:
    """A chain of kernels."""
    kernels = tuple(
        KernelSpec(
            SignatureId(signature),
            WeightsId(100 * weights + index),
            (KernelIndex(index - 1),) if index else (),
            False,
        )
        for index, signature in enumerate(signatures)
    )
    return TenantSpec(name, kernels, 1.0, limit, priority)


def draw_tenant(index: int, rng: Random) -> SimTenant:
    return SimTenant(
        spec=make_spec(
            f"t{index}",
            [rng.randrange(6) for _ in range(rng.randint(0, 6))],
            rng.randrange(4),
            priority=rng.randint(1, 3),
            limit=rng.choice((2, 8, 64)),
        ),
        rate_hz=rng.uniform(10, 400),
        deadline_ns=rng.randint(2, 80) * MS,
        traffic=rng.choice(
            (
                Traffic(),
                Traffic(cv=rng.choice((0.5, 4.0))),
                Traffic(on_ns=5 * MS, off_ns=20 * MS),
                Traffic(trace_ns=tuple(sorted(rng.randrange(10 * MS) for _ in range(50)))),
            )
        ),
        rows=(1, rng.randint(1, 8)),
        bytes_needed=rng.randrange(1000),
        slowdown=rng.choice((1.0, 1.0, 1.0, 4.0)),
    )


def draw_scenario(seed: int) -> Scenario:
    """Sizes, traffic, limits, devices and faults, all from the seed."""
    rng = Random(f"scenario {seed}")
    tenants = tuple(draw_tenant(index, rng) for index in range(rng.randint(1, 8)))
    slots = rng.choice((1, 1, 3))
    return Scenario(
        tenants=tenants,
        duration_ns=150 * MS,
        policy=rng.choice(sorted(POLICIES)),
        devices=rng.choice((1, 1, 2)),
        limits=CoreLimits(
            window=rng.choice((4, 32, 256)),
            slots=slots,
            segments=rng.choice((1, 4, 64)),
            bytes=rng.choice((3000, 1 << 30)),
            preemption_bound_ns=rng.choice((1, 10)) * MS,
            admission=rng.random() < 0.7,
        ),
        cost=LinearCost(rng.randint(10, 500) * 1000, rng.randint(1, 50) * 1000, 5000),
        device=DeviceModel(
            noise=rng.uniform(0, 0.5),
            contention=rng.choice((0.4, 1.0, 1.5)),
            overhead_ns=rng.choice((0, 20_000)),
            fail_rate=rng.choice((0.0, 0.02, 0.3)),
            slow_rate=rng.choice((0.0, 0.05)),
        ),
        faults=Faults(
            cancel_rate=rng.choice((0.0, 0.1)),
            compile_failures=rng.randrange(3),
            device_losses=rng.randrange(3),
            bursts=rng.randrange(3),
            burst_requests=rng.choice((20, 200)),
            clock_jumps=rng.randrange(3),
            jump_ns=rng.choice((1, 50)) * MS,
        ),
        blocking=slots == 1 and rng.random() < 0.3,
    )
