"""Exact mode: the bits of a row do not depend on what shares its launch, nor on where it lies.

NOTE the one idea: a library call gives the same bits for the same shapes and alignment, so what
rounds is run in pieces of fixed shape, and everything else at once. Per step of a plan:

- moves and elementwise ops give an element the same bits wherever it is, except those of `WIDE`,
  where torch has one formula for whole vectors and another for what is left over; these run on
  whole vectors only (`on_whole_vectors`)
- other packed ops run on blocks of rows; a block may hold rows of several requests, and is filled
  up with its last row, which can do nothing that row could not. Which sizes of block agree with
  each other, whatever the row's place, is tried when the plan is made (`BlockSizes`), on fixed data
- ops that need the segments run row by row, ops run EACH request by request

See docs/decisions/009-exact-mode.md for what was seen. Used by `compile` for exact kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coissue.kernels.cpu import ops
from coissue.kernels.cpu.frame import Frame, Packing, Span
from coissue.kernels.cpu.store import StoredWeight
from coissue.kernels.ir import Op
from coissue.kernels.lowered import Layout, Mode
from coissue.kernels.passes.layouts import POINTWISE
from coissue.kernels.passes.rewrite import freeze_attrs

Tensor = torch.Tensor
Step = Callable[[Frame], None]
#: Bytes: the alignment of torch's own memory, which every library call gets.
ALIGNMENT = 64
#: Elements: whole vectors of every dtype, unrolled as torch unrolls them.
VECTORS = 128
#: Elements: below torch's grain, so that a call is never cut among threads.
PIECE = 1 << 14
#: Rows per block that are tried; a launch uses the largest that fit.
SIZES = (1, 4, 16, 64)
#: Elements of a block's largest value beyond which no larger one is tried.
BLOCK_ELEMENTS = 1 << 20
#: Ops with another formula at the end of a tensor than in whole vectors, or that may have one.
WIDE = frozenset("""
    sigmoid tanh exp log log1p rsqrt erf sin cos pow silu mish softplus gelu elu
""".split())  # fmt: skip
MOVES = frozenset("""
    reshape permute expand slice select concat flip pad index gather embedding full arange
""".split())  # fmt: skip


def on_whole_vectors(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An elementwise function, called on contiguous multiples of `VECTORS` elements only."""

    def run(*xs: Tensor) -> Tensor:
        xs = torch.broadcast_tensors(*xs) if len(xs) > 1 else xs
        shape, count = xs[0].shape, xs[0].numel()
        flat = [x.contiguous().view(-1) for x in xs]
        short = -count % VECTORS
        if short:
            flat = [torch.cat([x, x.new_ones(short)]) for x in flat]
        if count > PIECE and torch.get_num_threads() > 1:
            pieces = zip(*(x.split(PIECE) for x in flat), strict=True)
            y = torch.cat([fn(*piece) for piece in pieces])
        else:
            y = fn(*flat)
        return y[:count].view(shape)

    return run


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a plan, and what it touches: slots with how their values lie in memory."""

    op: Op
    mode: Mode
    step: Step
    #: Slots that no later step reads.
    kills: tuple[int, ...]
    #: Without what follows from weights or constants alone.
    reads: tuple[tuple[int, Packing], ...]
    writes: tuple[tuple[int, Packing], ...]
    #: What follows from weights: (slot, shape, dtype, whether it is a weight of the store).
    fixed: tuple[tuple[int, tuple[int, ...], str, bool], ...]

    @property
    def is_free(self) -> bool:
        """Whether an element has the same bits wherever it is."""
        if self.op.name == "opaque":
            return False
        is_float = any(ops.DTYPES[p.type.dtype].is_floating_point for _, p in self.writes)
        return not is_float or self.op.name in POINTWISE or self.op.name in MOVES

    @property
    def layout(self) -> Layout:
        return self.writes[0][1].layout


class BlockSizes:
    """Which sizes of block agree, per op and types; tried once each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, part: Part, constants: Sequence[Any]) -> tuple[int, ...]:
        """Sizes in which every row has the same bits in every place; one of them at least."""
        values = [[str(p.layout), p.type] for _, p in (*part.reads, *part.writes)]
        fixed = [entry[1:] for entry in part.fixed]
        key = repr((part.op.name, freeze_attrs(part.op.attrs), values, fixed))
        if key not in self._known:
            self._known[key] = _agreeing(part, constants)
        return self._known[key]


def _agreeing(part: Part, constants: Sequence[Any]) -> tuple[int, ...]:
    """The most sizes that agree; if it can be, with 1, which needs no filling up."""
    elements = [math.prod(p.packed_shape(1, 1)) for _, p in (*part.reads, *part.writes)]
    sizes = [size for size in SIZES if size == 1 or size * max(elements) <= BLOCK_ELEMENTS]
    of_row = sum(math.prod(p.packed_shape(1, 1)) for _, p in part.writes)
    like_first, like_second = set(sizes), set(sizes)
    for seed in range(max(2, min(64, 512 // max(of_row, 1)))):
        made = [_trial(part, constants, size, seed) for size in sizes]
        like_first -= _unlike(sizes, made, 0)
        if len(sizes) > 1:
            like_second -= _unlike(sizes, made, 1)
    # An image is work enough for one call, and filling up would multiply it.
    if part.op.name != "conv" and len(sizes) > 1 and sizes[1] in like_second - like_first:
        return tuple(sorted(like_second))
    return tuple(sorted(like_first))


def _unlike(sizes: Sequence[int], made: Sequence[Sequence[Tensor]], wanted: int) -> set[int]:
    """The sizes with a row unlike the first row of the size at `wanted`."""
    return {
        size
        for size, rows in zip(sizes, made, strict=True)
        if any(bool((row != want[:1]).any()) for row, want in zip(rows, made[wanted], strict=True))
    }


def _trial(part: Part, constants: Sequence[Any], size: int, seed: int) -> list[Tensor]:
    """The step on `size` times the same row of fixed data; per output (size, bytes of a row)."""
    random = torch.Generator().manual_seed(seed)
    env = list(constants)
    for slot, shape, dtype, is_stored in part.fixed:
        tensor = _drawn(shape, dtype, random).abs() if dtype != "bool" else _drawn(shape, dtype)
        env[slot] = StoredWeight("", tensor) if is_stored else tensor
    for slot, packing in part.reads:
        row = _drawn(packing.packed_shape(1, 1), packing.type.dtype, random)
        env[slot] = torch.cat([row] * size)
    part.step(Frame(env, (size,), (1,)))
    return [env[slot].reshape(size, -1).contiguous().view(torch.uint8) for slot, _ in part.writes]


def _drawn(shape: tuple[int, ...], dtype: str, random: torch.Generator | None = None) -> Tensor:
    kept = ops.DTYPES[dtype]
    if not kept.is_floating_point:  # true, or an index that every table has
        return torch.full(shape, dtype == "bool", dtype=kept)
    return torch.randn(shape, generator=random).to(kept)


def arrange(
    parts: Sequence[Part], outputs: Collection[int], sizes_of: Callable[[Part], tuple[int, ...]]
) -> list[tuple[Step, tuple[int, ...]]]:
    """The parts as steps that keep exact mode's rule. `outputs`: slots read after the last."""
    sections: list[Section] = []
    for part in parts:
        last = sections[-1] if sections else None
        if part.is_free:
            if last is None or not last.can_take(part, last.sizes):
                sections.append(Section(part, ()))
            else:
                last.parts.append(part)
        elif part.mode is Mode.PACKED:
            sizes = sizes_of(part)
            common = tuple(size for size in sizes if last is not None and size in last.sizes)
            if last is not None and last.can_take(part, common):
                last.parts.append(part)
                last.sizes = common
            else:
                sections.append(Section(part, sizes))
        else:
            sections.append(Section(part, ()))
    read_later = set(outputs)
    for section in reversed(sections):
        section.settle(read_later)
        read_later.update(slot for slot, _ in section.reads)
    return [(section.run, tuple(section.kills)) for section in sections]


class Section:
    """Parts run together, piece by piece. `sizes`: of its blocks; none if it has no blocks."""

    def __init__(self, part: Part, sizes: tuple[int, ...]) -> None:
        self.parts = [part]
        self.sizes = sizes
        self.reads: list[tuple[int, Packing]] = []
        self.writes: list[tuple[int, Packing]] = []
        self.kills: set[int] = set()

    def can_take(self, part: Part, sizes: tuple[int, ...]) -> bool:
        """Whether `part` may join a section of blocks."""
        is_alike = part.mode is Mode.PACKED and part.layout is self.parts[0].layout
        return bool(sizes) and is_alike

    def settle(self, read_later: Collection[int]) -> None:
        """All parts are there: what goes in and out, now that the later sections are known."""
        made: dict[int, Packing] = {}
        reads: dict[int, Packing] = {}
        for part in self.parts:
            reads.update((slot, p) for slot, p in part.reads if slot not in made)
            made.update(part.writes)
            self.kills.update(part.kills)
        self.reads = list(reads.items())
        self.writes = [(slot, p) for slot, p in made.items() if slot in read_later]

    def run(self, frame: Frame) -> None:
        if self.parts[0].is_free:
            for part in self.parts:
                part.step(frame)
            return
        made: dict[int, list[Any]] = {slot: [] for slot, _ in self.writes}
        for span, rows in self._spans(frame):
            env = frame.env.copy()
            for slot, packing in self.reads:
                env[slot] = _piece(frame.env[slot], packing, span, rows)
            for part in self.parts:
                part.step(Frame(env, (rows,), (span.length,)))
            for slot, packing in self.writes:
                own = env[slot]
                if packing.is_packed and rows > span.rows:
                    own = own[: packing.entries(span.rows, span.tokens)]
                made[slot].append(own if packing.is_packed else own[0])
        for slot, packing in self.writes:
            frame.env[slot] = _joined(packing, made[slot])

    def _spans(self, frame: Frame) -> Iterator[tuple[Span, int]]:
        """The pieces, each with the number of rows it is filled up to."""
        if self.sizes:
            # In a block a token is as good as a row: all its values have one layout.
            total = frame.tokens if self.parts[0].layout is Layout.TOKENS else frame.rows
            start = 0
            while start < total:
                left = total - start
                size = max((s for s in self.sizes if s <= left), default=self.sizes[0])
                count = min(size, left)
                yield Span(0, start, count, start, count, 1), size
                start += count
            return
        # A state of a recurrence is kept per request, so where one is needed rows stay together.
        whole = self.parts[0].mode is Mode.EACH or any(not p.is_packed for _, p in self.writes)
        for span in frame.spans(by_row=not whole):
            yield span, span.rows


def _piece(value: Any, packing: Packing, span: Span, rows: int) -> Any:
    """The span's part of a value, in memory of its own unless it is aligned already."""
    if not packing.is_packed:
        return [_settled(value[span.segment])]
    start = packing.entries(span.row, span.token)
    own = value[start : start + packing.entries(span.rows, span.tokens)]
    return _filled_up(own, packing, rows - span.rows) if rows > span.rows else _settled(own)


def _filled_up(rows: Tensor, packing: Packing, missing: int) -> Tensor:
    """With the last row again: zeros might be divided by, or be no index of any table."""
    return torch.cat([rows, *[rows[-packing.scale :]] * missing])


def _joined(packing: Packing, pieces: list[Any]) -> Any:
    if not packing.is_packed:
        return pieces
    if not pieces:  # rows without tokens
        return torch.empty(packing.packed_shape(0, 0), dtype=ops.DTYPES[packing.type.dtype])
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _settled(x: Tensor) -> Tensor:
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
