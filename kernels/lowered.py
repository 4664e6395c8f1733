"""A program after the passes: layouts, kernels and their order, as data.

Made by `passes.pipeline.lower`, read by the devices, the cost estimates and attach. Data only.

A launch runs one kernel for segments i = 1..n; segment i has R_i rows of T_i tokens. A value that
can be *packed* exists once per launch, as the requests' tensors one after the other. Rules (N_rows
= sum of R_i, N_tokens = sum of R_i * T_i, ... = fixed extents):

    layout  logical type (one request)         packed tensor
    FIXED   no R, no T, no input behind it     not packed: the same for all requests of a weight set
    ROWS    (k*R, ...)                         (k * N_rows, ...)
    TOKENS  (R, T, ...) or (k*R*T, ...)        (N_tokens, ...) or (k * N_tokens, ...)
    EACH    anything else                      not packed: one tensor per request, logical shape

So a packed tensor is the concatenation of the requests' logical tensors along axis 0, after (R, T)
was flattened into one axis; request i owns `k * R_i` (or `k * R_i * T_i`) consecutive entries.
Any axis attribute of an op (dim, dims, axes counted from the front) speaks of the logical shape:
in a packed (R, T, ...) value each axis after T is one less. The layout says how a value is kept,
not how it was computed: the mean over the rows of one request, expanded back to (R, H), is ROWS.

How an op is run is its `Mode`, proved op by op in `passes.layouts`:

    ONCE      inputs and outputs FIXED: once per weight set. These ops are repeated in each kernel
              that needs them, so a FIXED value is never in `Kernel.inputs` (only a program output
              may be a FIXED kernel output)
    PACKED    one call on the packed tensors, whatever the segments are. A FIXED operand of a
              broadcasting op is aligned from the right after the axes that meet a packed axis
              (all of extent 1; never the two matrix axes of a matmul) are dropped. Ops without a
              packed input (`full`, `expand` of a FIXED value) take the packed extent from the
              segments
    SEGMENTS  needs the segments' offsets; exactly these:
                attention   "bshd", q/k/v TOKENS (R,T,h,d), mask none or key TOKENS (R,T) -> TOKENS
                lstm gru rnn  x TOKENS (R,T,I) -> y TOKENS, or x ROWS (R,S,I) -> y ROWS; h_n and c_n
                            are EACH (layers*dirs, R_i, hidden); mostly unused: `canonicalise`
                            reads the last layer's h_n from y
                sum mean amax amin  TOKENS (R,T,...) over dims == (1,) -> ROWS, keepdim (R,1,...)
                select      of TOKENS, dim 1, index 0 or -1 -> ROWS
                embedding_bag  idx TOKENS (R,T) -> ROWS
                expand      ROWS (R,1,...) -> TOKENS (R,T,...)
    EACH      once per request, on that request's part of each input, in logical shapes. Its outputs
              are then kept as their layout says (cat, if ROWS or TOKENS). Always right
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coissue.kernels.ir import Op, Program


class Layout(enum.Enum):
    """How a value is kept; see the module docstring."""

    FIXED = "fixed"
    ROWS = "rows"
    TOKENS = "tokens"
    EACH = "each"


class Mode(enum.Enum):
    """How an op is run in a launch; see the module docstring."""

    ONCE = "once"
    PACKED = "packed"
    SEGMENTS = "segments"
    EACH = "each"


class KernelKind(enum.Enum):
    """What a kernel is built around. STITCHED: memory-bound ops only. JOINED: made by `link`."""

    GEMM = "gemm"
    CONV = "conv"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    EMBEDDING = "embedding"
    STITCHED = "stitched"
    OPAQUE = "opaque"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launchable unit. Kernels of equal signature correspond position by position."""

    #: In an order that can be run; each anchor with its epilogue after it.
    ops: tuple[Op, ...]
    #: One per op.
    modes: tuple[Mode, ...]
    #: Values read that are neither weights nor made inside: program inputs, other kernels' outputs.
    inputs: tuple[int, ...]
    #: Values made here that other kernels or the program's outputs need. All others are local.
    outputs: tuple[int, ...]
    #: Weight values in order of first use: the order of a device's weight set.
    weights: tuple[int, ...]
    kind: KernelKind
    #: Whether the work grows with tokens (sum of R_i * T_i) or with rows (sum of R_i).
    per_token: bool
    #: Hex digest of structure, attributes, dtypes, dims (R and T symbolic), layouts and modes.
    #: Not of weights, limits or names.
    signature: str
    #: Whether a row's bits must not depend on the rest of the launch. Part of the signature.
    exact: bool
    #: Whether some rows of a request may be run before its others; see `layouts.is_splittable`.
    splittable: bool


def describe_kernel(kernel: Kernel) -> str:
    """In few words; equal kernels alike."""
    names = [op.name for op in kernel.ops]
    shown = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
    return f"{kernel.kind.value} {shown} #{kernel.signature[:6]}"


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program ready for devices."""

    #: Canonicalised: same inputs, outputs and meaning as the captured program.
    program: Program
    #: One per value of `program`.
    layouts: tuple[Layout, ...]
    #: Topological order.
    kernels: tuple[Kernel, ...]
    #: Per kernel: the kernels that must be done before it. Besides those whose outputs it reads,
    #: the other readers of each value it drops.
    producers: tuple[tuple[int, ...], ...]
    #: Per kernel: the values (program inputs too) that nothing reads once it is done. Never a
    #: program output.
    drops: tuple[tuple[int, ...], ...]
