"""Control cost per kernel: wall time of `Core.handle` per kernel retired, without any device.

    python load_tests/micro/core_decision.py [--repeats 7] [--profile WINDOW GROUP]

The window is kept full: each request that ends is replaced, in the same turn, by a new one. `group`
is how many kernels one launch takes at most (`segments`); `programs` different programs of eight
kernels are spread over the tenants, each with weights of its own. Where `gain` is no, sharing a
launch with other weights costs more than it saves, and who may go with the lead must be searched.
A turn is LaunchDone and the submissions that replace ended requests: retire, make successors ready,
admit, pick, coalesce, dispatch. The cost model is a linear formula (its share is inside the
number). Prints the median over repeats, and one JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import statistics
import time
from random import Random

from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Attached,
    Command,
    Complete,
    Event,
    KernelIndex,
    KernelSpec,
    Launch,
    LaunchDone,
    RequestId,
    SignatureId,
    Submitted,
    TenantSpec,
    WeightsId,
)
from coissue.scheduler.null_device import LinearCost
from coissue.scheduler.ports import CoreLimits

TENANTS, KERNELS, PROGRAMS = 12, 8, 3
SECOND = 1_000_000_000


def make_core(window: int, group: int, programs: int, tenants: int, *, gain: bool = True) -> Core:
    limits = CoreLimits(window=window, segments=group, preemption_bound_ns=SECOND, admission=True)
    core = Core(limits, "space_time", LinearCost(1000, 100, 100 if gain else 2000), Random(0))
    for index in range(tenants):
        first = index % programs * KERNELS
        kernels = tuple(
            KernelSpec(
                SignatureId(first + k),
                WeightsId(index * KERNELS + k),
                (KernelIndex(k - 1),) if k else (),
                False,
            )
            for k in range(KERNELS)
        )
        core.handle(Attached(0, TenantSpec(f"tenant-{index}", kernels, 1.0, window, 1 + index % 2)))
    return core


class Load:
    """Keeps the window full and counts what is retired."""

    def __init__(self, core: Core, tenants: int) -> None:
        self.core = core
        self._tenants = tenants
        self._next_id = 0
        self._rng = Random(1)
        self._commands: list[Command] = core.handle(
            *[self._submit(1) for _ in range(core.limits.window)]
        )

    def _submit(self, at_ns: int) -> Submitted:
        self._next_id += 1
        deadline_ns = at_ns + self._rng.randrange(SECOND, 20 * SECOND)
        tenant = f"tenant-{self._next_id % self._tenants}"
        rows = self._rng.randrange(1, 5)
        return Submitted(at_ns, RequestId(self._next_id), tenant, rows, 0, deadline_ns, 0, 1000)

    def run(self, kernels: int) -> float:
        """Seconds of `handle` per kernel."""
        spent_s, retired = 0.0, 0
        core = self.core
        while retired < kernels:
            launch = next(c for c in self._commands if isinstance(c, Launch))
            now_ns = core.now_ns + launch.predicted_ns
            events: list[Event] = [LaunchDone(now_ns, launch.launch, launch.predicted_ns)]
            ended = sum(isinstance(c, Complete) for c in self._commands)
            events += [self._submit(now_ns) for _ in range(ended)]
            start_s = time.perf_counter()
            self._commands = core.handle(*events)
            spent_s += time.perf_counter() - start_s
            retired += len(launch.segments)
            core.trace.take()
        return spent_s / retired


def measure(
    window: int, group: int, programs: int, tenants: int, gain: bool, repeats: int
) -> dict:  # fmt: skip
    load = Load(make_core(window, group, programs, tenants, gain=gain), tenants)
    kernels = max(4000, 2 * window)
    load.run(kernels)
    gc.collect()
    found_us = [load.run(kernels) * 1e6 for _ in range(repeats)]
    rejected = [o.value for o, count in load.core.stats().outcomes.items() if count]
    return {
        "window": window,
        "group": group,
        "programs": programs,
        "tenants": tenants,
        "gain": "yes" if gain else "no",
        "us_per_kernel": round(statistics.median(found_us), 2),
        "us_min": round(min(found_us), 2),
        "us_max": round(max(found_us), 2),
        "outcomes": rejected,
    }


CASES = (
    (16, 1, 3, 12), (16, 8, 3, 12), (256, 1, 3, 12), (256, 4, 3, 12), (256, 16, 3, 12),
    (256, 64, 3, 12), (256, 1, 200, 200), (256, 16, 12, 200), (4096, 1, 3, 12),
    (4096, 16, 3, 12), (4096, 256, 3, 12),
)  # fmt: skip
SHOWN = ("window", "group", "programs", "tenants", "gain", "us_per_kernel")
APART = ((256, 64, 1, 64), (4096, 256, 1, 64), (4096, 256, 1, 1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", type=int, nargs=2, metavar=("WINDOW", "GROUP"))
    arguments = parser.parse_args()
    if arguments.profile:
        window, group = arguments.profile
        load = Load(make_core(window, group, PROGRAMS, TENANTS), TENANTS)
        with cProfile.Profile() as profile:
            load.run(40_000)
        profile.create_stats()
        import pstats

        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        return
    rows = []
    print(" ".join(f"{name:>9}" for name in SHOWN), " min to max")
    for case in [*((*case, True) for case in CASES), *((*case, False) for case in APART)]:
        row = measure(*case, arguments.repeats)
        rows.append(row)
        shown = " ".join(f"{row[name]:>9}" for name in SHOWN)
        print(f"{shown}  {row['us_min']} to {row['us_max']} {row['outcomes']}")
    print(json.dumps({"benchmark": "core_decision", "repeats": arguments.repeats, "rows": rows}))


if __name__ == "__main__":
    main()
