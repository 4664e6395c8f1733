"""Joins consecutive kernels into longer launches, together for all attached programs.

NOTE the one idea: a launch should be long enough to hide its control time, but a joined kernel is
shared only by programs that join the same kernels. So every program is joined greedily up to a
bound in predicted time, and *cut* wherever some attached program stops being like it: where the
structure of two programs diverges (other heads on one backbone, also heads of another width), and
where two programs of one structure start or stop sharing weights (own heads of equal form: the
backbone's rows go into one product, the heads' do not). Cuts are keyed by the structure before
them, so programs that are alike up to there are cut alike, and what they share stays shared.

A kernel that hands out more in one program than in another (a second reader after the divergence)
has another signature there and is not shared.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coissue.kernels.cost import estimate
from coissue.kernels.lowered import Kernel, KernelKind, Lowered
from coissue.kernels.passes.fuse import arrange, assemble

#: Rows and tokens that joined kernels are sized for, and the speeds of the guess before measuring.
JOIN_SIZE: Final = (2, 16)
GUESS_FLOPS_PER_NS: Final = 40.0
GUESS_BYTES_PER_NS: Final = 8.0


def guess_times(programs: Sequence[Lowered]) -> Callable[[Kernel], int]:
    """Times in ns before anything was measured: they only decide which kernels are joined."""
    times: dict[str, int] = {}
    for lowered in programs:
        for kernel in lowered.kernels:
            if kernel.signature not in times:
                cost = estimate(lowered.program, kernel.ops, kernel.outputs, *JOIN_SIZE)
                guess = cost.flops / GUESS_FLOPS_PER_NS + cost.bytes_moved / GUESS_BYTES_PER_NS
                times[kernel.signature] = round(guess)
    return lambda kernel: times[kernel.signature]


def cut(
    programs: Mapping[str, Lowered], predict: Callable[[Kernel], int], bound_ns: int
) -> dict[str, Lowered]:
    """All attached programs with their kernels joined.

    `programs` come from `lower`, not from `cut`. `predict(kernel)` is its time in ns at the size
    the bound is meant for; a kernel over `bound_ns` stays alone. Kernels of equal signature must
    be predicted alike.
    """
    outlines = {name: outline(lowered) for name, lowered in programs.items()}
    cuts = find_cuts(list(dict.fromkeys(outlines.values())))
    return {
        name: _join(lowered, list(_runs(lowered.kernels, outlines[name], cuts, predict, bound_ns)))
        for name, lowered in programs.items()
    }


@dataclass(frozen=True, slots=True)
class Outline:
    """What the cuts depend on; one entry per kernel."""

    #: Digest of the structure of all kernels up to this one, with their wiring.
    prefixes: tuple[str, ...]
    #: Digests of the kernel's weights.
    weights: tuple[tuple[str, ...], ...]


def outline(lowered: Lowered) -> Outline:
    digests = {weight.value: weight.digest for weight in lowered.program.weights}
    source: dict[int, object] = {
        port.value: ["input", index] for index, port in enumerate(lowered.program.inputs)
    }
    prefix, prefixes = "", []
    for index, kernel in enumerate(lowered.kernels):
        wiring = [source[value] for value in kernel.inputs]
        text = json.dumps([prefix, kernel.signature, wiring])
        prefix = hashlib.sha256(text.encode()).hexdigest()
        prefixes.append(prefix)
        source.update({value: [index, place] for place, value in enumerate(kernel.outputs)})
    weights = tuple(tuple(digests[v] for v in kernel.weights) for kernel in lowered.kernels)
    return Outline(tuple(prefixes), weights)


def find_cuts(outlines: Sequence[Outline]) -> set[str]:
    """The prefixes after which to cut."""
    cuts: set[str] = set()
    for a, b in itertools.combinations(outlines, 2):
        alike: bool | None = None
        shared = 0
        for index, (mine, its) in enumerate(zip(a.prefixes, b.prefixes, strict=False)):
            if mine != its:
                break
            shared = index + 1
            if not a.weights[index]:
                continue
            now = a.weights[index] == b.weights[index]
            if alike is not None and now != alike:
                cuts.add(a.prefixes[index - 1])
            alike = now
        if shared:
            cuts.add(a.prefixes[shared - 1])
    return cuts


def _runs(
    kernels: Sequence[Kernel],
    plan: Outline,
    cuts: set[str],
    predict: Callable[[Kernel], int],
    bound_ns: int,
) -> Iterator[list[int]]:
    """The kernels to join, by index, in order."""
    run: list[int] = []
    total_ns = 0
    for index, kernel in enumerate(kernels):
        time_ns = predict(kernel)
        if run and (total_ns + time_ns > bound_ns or plan.prefixes[index - 1] in cuts):
            yield run
            run, total_ns = [], 0
        run.append(index)
        total_ns += time_ns
    if run:
        yield run


def _join(lowered: Lowered, runs: Sequence[Sequence[int]]) -> Lowered:
    home = {index: number for number, run in enumerate(runs) for index in run}
    maker = {value: i for i, kernel in enumerate(lowered.kernels) for value in kernel.outputs}
    crossing = {port.value for port in lowered.program.outputs}
    for index, kernel in enumerate(lowered.kernels):
        for value in kernel.inputs:
            if value in maker and home[maker[value]] != home[index]:
                crossing.add(value)
    kernels = [_joined(lowered, [lowered.kernels[i] for i in run], crossing) for run in runs]
    return arrange(lowered.program, lowered.layouts, kernels)


def _joined(lowered: Lowered, parts: Sequence[Kernel], crossing: set[int]) -> Kernel:
    """One kernel of `parts`; FIXED ops that several of them repeat are kept once."""
    if len(parts) == 1:
        return parts[0]
    steps = {
        op.outputs: (op, mode)
        for part in parts
        for op, mode in zip(part.ops, part.modes, strict=True)
    }
    kinds = {part.kind for part in parts}
    kind = kinds.pop() if len(kinds) == 1 else KernelKind.JOINED
    handed = crossing.intersection(value for part in parts for value in part.outputs)
    exact = parts[0].exact
    return assemble(lowered.program, lowered.layouts, list(steps.values()), kind, handed, exact)
