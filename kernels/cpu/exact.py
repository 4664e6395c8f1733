"""Exact mode: the bits of a row do not depend on what shares its launch, nor on where it lies.

NOTE the one idea: a library call gives the same bits for the same shapes and alignment, so what
rounds is run in pieces of fixed shape, and everything else at once. Per step of a plan:

- moves and elementwise ops give an element the same bits wherever it is, except those of `WIDE`,
  where torch has one formula for whole vectors and another for what is left over; these run on
  whole vectors only (`on_whole_vectors`)
- other packed ops run on blocks of rows; a block may hold rows of several requests, and is filled
  up with its last row, which can do nothing that row could not. Which sizes of block agree with
  each other, whatever the row's place, is tried when the plan is made (`BlockSizes`), on fixed data
- ops that need the segments run on blocks of rows of one length, tried when a length is first seen
- ops run EACH run request by request, and so do recurrences whose last states are needed

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
WIDE = frozenset(
    ("sigmoid", "tanh", "exp", "log", "log1p", "rsqrt", "erf", "sin", "cos", "pow", "silu", "mish",
     "softplus", "gelu", "elu")
)  # fmt: skip
MOVES = frozenset(
    ("reshape", "permute", "expand", "slice", "select", "concat", "flip", "pad", "index", "gather",
     "embedding", "full", "arange")
)  # fmt: skip


def on_whole_vectors(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An elementwise function, called on contiguous multiples of `VECTORS` elements only."""

    def run(*xs: Tensor) -> Tensor:
        # torch does not annotate it.
        same = torch.broadcast_tensors(*xs)  # type: ignore[no-untyped-call]
        shape, count = same[0].shape, same[0].numel()
        flat = [x.contiguous().view(-1) for x in same]
        short = -count % VECTORS
        if short:
            flat = [torch.cat([x, x.new_ones(short)]) for x in flat]
        if count > PIECE and torch.get_num_threads() > 1:
            starts = range(0, count, PIECE)
            y = torch.cat([fn(*(x[i : i + PIECE] for x in flat)) for i in starts])
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
    """Which sizes of block agree, per op, types and tokens per row; tried once each."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def of(self, part: Part, constants: Sequence[Any], length: int) -> tuple[int, ...]:
        """Sizes in which every row has the same bits in every place; one of them at least."""
        values = [[str(p.layout), p.type] for _, p in (*part.reads, *part.writes)]
        fixed = [entry[1:] for entry in part.fixed]
        key = repr((part.op.name, freeze_attrs(part.op.attrs), values, fixed, length))
        if key not in self._known:
            self._known[key] = _agreeing(part, constants, length)
        return self._known[key]


def _agreeing(part: Part, constants: Sequence[Any], length: int) -> tuple[int, ...]:
    """The most sizes that agree; if it can be, with 1, which needs no filling up."""
    packings = [p for _, p in (*part.reads, *part.writes) if p.is_packed]
    elements = [math.prod(p.packed_shape(1, length)) for p in packings]
    sizes = [size for size in SIZES if size == 1 or size * max(elements) <= BLOCK_ELEMENTS]
    if sizes == [1]:
        return (1,)
    of_row = sum(elements[-len(part.writes) :])
    like_first, like_second = set(sizes), set(sizes)
    for seed in range(max(2, min(64, 512 // max(of_row, 1)))):
        made = [_trial(part, constants, size, length, seed) for size in sizes]
        like_first -= _unlike(sizes, made, 0)
        like_second -= _unlike(sizes, made, 1)
    # An image is work enough for one call, and filling up would multiply it.
    if part.op.name != "conv" and sizes[1] in like_second - like_first:
        return tuple(sorted(like_second))
    return tuple(sorted(like_first))


def _unlike(sizes: Sequence[int], made: Sequence[Sequence[Tensor]], wanted: int) -> set[int]:
    """The sizes with a row unlike the first row of the size at `wanted`."""
    return {
        size
        for size, rows in zip(sizes, made, strict=True)
        if any(bool((row != want[:1]).any()) for row, want in zip(rows, made[wanted], strict=True))
    }


def _trial(part: Part, constants: Sequence[Any], size: int, length: int, seed: int) -> list[Tensor]:
    """The step on `size` times the same row of fixed data; per output (size, bytes of a row)."""
    random = torch.Generator().manual_seed(seed)
    env = list(constants)
    for slot, shape, dtype, is_stored in part.fixed:
        tensor = _drawn(shape, dtype, random).abs() if dtype != "bool" else _drawn(shape, dtype)
        env[slot] = StoredWeight("", tensor) if is_stored else tensor
    for slot, packing in part.reads:
        row = _drawn(packing.packed_shape(1, length), packing.type.dtype, random)
        env[slot] = torch.cat([row] * size)
    part.step(Frame(env, (size,), (length,)))
    packed = [env[slot] for slot, packing in part.writes if packing.is_packed]
    return [tensor.reshape(size, -1).contiguous().view(torch.uint8) for tensor in packed]


def _drawn(shape: tuple[int, ...], dtype: str, random: torch.Generator | None = None) -> Tensor:
    kept = ops.DTYPES[dtype]
    if not kept.is_floating_point:  # true, or an index that every table has
        return torch.full(shape, dtype == "bool", dtype=kept)
    return torch.randn(shape, generator=random).to(kept)


def arrange(
    parts: Sequence[Part],
    outputs: Collection[int],
    sizes_of: Callable[[Part, int], tuple[int, ...]],
) -> list[tuple[Step, tuple[int, ...]]]:
    """The parts as steps that keep exact mode's rule. `outputs`: slots read after the last."""
    sections: list[Section] = []
    for part in parts:
        is_block = part.mode is Mode.PACKED and not part.is_free
        sizes = sizes_of(part, 1) if is_block else ()
        last = sections[-1] if sections else Section(part, (), sizes_of)
        common = tuple(s for s in last.sizes if s in sizes) if is_block else last.sizes
        # The smallest must stay, else an image would be filled up for the sake of a small GEMM.
        if common and common[0] == last.sizes[0] and last.is_like(part):
            last.parts.append(part)
            last.sizes = common
        else:
            sections.append(Section(part, sizes, sizes_of))
    read_later = set(outputs)
    for section in reversed(sections):
        section.settle(read_later)
        read_later.update(slot for slot, _ in section.reads)
    return [(section.run, tuple(section.kills)) for section in sections]


class Section:
    """Parts run together, piece by piece. `sizes`: of its blocks of packed rows, if it has such."""

    def __init__(
        self, part: Part, sizes: tuple[int, ...], sizes_of: Callable[[Part, int], tuple[int, ...]]
    ) -> None:
        self.parts = [part]
        self.sizes = sizes
        self.reads: list[tuple[int, Packing]] = []
        self.writes: list[tuple[int, Packing]] = []
        self.kills: set[int] = set()
        self._sizes_of = sizes_of
        #: Tokens per row -> sizes of blocks of rows of that length.
        self._by_length: dict[int, tuple[int, ...]] = {}

    def is_like(self, part: Part) -> bool:
        return part.mode is Mode.PACKED and part.layout is self.parts[0].layout

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
        first = self.parts[0]
        # A state of a recurrence is kept per request, so where one is needed rows stay together.
        if first.mode is Mode.EACH or any(not p.is_packed for _, p in self.writes):
            for span in frame.spans():
                yield span, span.rows
            return
        runs = frame.runs
        if self.sizes:  # a token is as good as a row: all values of a block have one layout
            runs = [(frame.tokens if first.layout is Layout.TOKENS else frame.rows, 1, 0, 0)]
        for total, length, row, token in runs:
            sizes = self.sizes or self._of_length(length)
            stop = row + total
            while row < stop:
                size = max((s for s in sizes if s <= stop - row), default=sizes[0])
                rows = min(size, stop - row)
                yield Span(0, row, rows, token, rows * length, length), size
                row, token = row + rows, token + rows * length

    def _of_length(self, length: int) -> tuple[int, ...]:
        if length not in self._by_length:
            self._by_length[length] = self._sizes_of(self.parts[0], length)
        return self._by_length[length]


def _piece(value: Any, packing: Packing, span: Span, rows: int) -> Any:
    """The span's part of a value, in memory of its own unless it is aligned already."""
    if not packing.is_packed:
        return [settled(value[span.segment])]
    start = packing.entries(span.row, span.token)
    own = value[start : start + packing.entries(span.rows, span.tokens)]
    if rows == span.rows:
        return settled(own)
    return _filled_up(own, packing.entries(1, span.length), rows - span.rows)


def _filled_up(rows: Tensor, entries: int, missing: int) -> Tensor:
    """With the last row again: zeros might be divided by, or be no index of any table."""
    return torch.cat([rows, *[rows[len(rows) - entries :]] * missing])


def _joined(packing: Packing, pieces: list[Any]) -> Any:
    if not packing.is_packed:
        return pieces
    if not pieces:  # rows without tokens
        return torch.empty(packing.packed_shape(0, 0), dtype=ops.DTYPES[packing.type.dtype])
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def settled(x: Tensor) -> Tensor:
    """`x` as torch itself would lay it out: a call may take another way for any other strides, also
    along axes of one element, and for other alignments."""
    stride = 1
    for extent, own in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if own != stride:
            return x.clone(memory_format=torch.contiguous_format)
        stride *= max(extent, 1)
    if x.data_ptr() % ALIGNMENT:
        return x.clone(memory_format=torch.contiguous_format)
    return x
