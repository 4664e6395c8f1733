"""A fault campaign: drawn scenarios with every kind of fault, every invariant after every turn.

    python -m load_tests.sim.faults [--seeds 1000] [--first 0] [--processes 2] [--write]

Slow and failed launches, lost plans, a device lost and back, clients gone at any moment, bursts of
one tenant, clock jumps, slow tenants; afterwards all must drain within the bound of
`coissue.scheduler.simulation.engine.drain_bound_ns`. Every `STRAGGLERS_EVERY`th seed is
besides a longer run with slow tenants, judged by `stragglers`. A seed that fails is stored with its
scenario in tests/sim/seeds/ and so becomes a test; commit the file with the repair.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from coissue.scheduler.messages import Outcome
from coissue.scheduler.plain import to_plain
from coissue.scheduler.simulation import Report, simulate
from load_tests import results
from load_tests.demo.data import ROOT
from load_tests.sim.drawn import draw_scenario
from load_tests.sim.stragglers import draw_stragglers, judge

SEEDS = ROOT / "tests" / "sim" / "seeds"
STRAGGLERS_EVERY = 8
#: How errors begin that `judge` found.
STRAGGLERS = "stragglers"


def run_seed(seed: int) -> tuple[int, str, Counter[str]]:
    """The seed, what broke (empty: nothing), and what it saw."""
    try:
        seen = count(simulate(draw_scenario(seed), seed))
        wrong = judge(draw_stragglers(seed), seed) if seed % STRAGGLERS_EVERY == 0 else []
        return seed, "".join(f"{STRAGGLERS}: {story}\n" for story in wrong), seen
    except Exception:
        return seed, traceback.format_exc(limit=-3), Counter()


def count(report: Report) -> Counter[str]:
    seen = Counter(launches=report.launch_count, turns=report.turn_count)
    for tenant in report.tenants.values():
        for outcome in Outcome:
            seen[outcome.value] += tenant.outcomes[outcome]
    return seen


def store(seed: int, error: str, folder: Path = SEEDS) -> Path:
    """Keeps the whole scenario, as the next draw from this seed may be another one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{seed}.json"
    draw = draw_stragglers if error.startswith(STRAGGLERS) else draw_scenario
    scenario = to_plain(draw(seed))
    document = {"seed": seed, "error": error.splitlines()[-1], "scenario": scenario}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="a result file in docs/results")
    args = parser.parse_args()
    console, started = Console(), time.monotonic()
    seeds, broken, seen = range(args.first, args.first + args.seeds), [], Counter[str]()
    with Pool(args.processes) as pool, Progress(console=console, transient=True) as bar:
        task = bar.add_task("seeds", total=args.seeds)
        for seed, error, counts in pool.imap_unordered(run_seed, seeds, chunksize=4):
            bar.advance(task)
            seen += counts
            if error:
                broken.append(seed)
                console.print(f"seed {seed} -> {store(seed, error)}\n{error}", markup=False)
    found = {
        "seeds": args.seeds, "first": args.first, "broken": sorted(broken), **seen,
        "wanted": "none broken",
    }  # fmt: skip
    console.print_json(json.dumps(found))
    if args.write:
        out = ROOT / "docs" / "results"
        results.write(out, "sim-faults", found, seconds=time.monotonic() - started)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
