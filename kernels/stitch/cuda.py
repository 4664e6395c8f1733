"""The CUDA dialect: stitched kernels of any number of tenants in one launch.

    extern "C" __global__ void NAME(const co_segment* segments, int count)

NOTE the one idea: a launch is a table of *segments* in device memory (horizontal packing). A
segment is one stitched kernel on one tenant's arrays: `first_block` is its first block in the grid,
`kernel` says which of the kernels of this source it runs (0 where there is one), `arrays` holds
one pointer per GLOBAL array (inputs, then outputs; unit 0 of those that are per unit). It has
units * blocks blocks; segments are in the order of `first_block`, which begins with 0. So several
tenants' kernels of one signature, and different kernels too, run side by side.

Launch with `threads(kernels)` threads per block and as many blocks as all segments have together. A
kernel that needs fewer threads lets the others go: a barrier waits for those that are left.

A block sums a row in two steps: shuffles inside each warp, then one partial result per warp
through shared memory, in two places by turns, so that one barrier per reduction is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

from coissue.kernels.stitch.affine import BLOCK
from coissue.kernels.stitch.barriers import WARP
from coissue.kernels.stitch.loops import (
    Array,
    LoopKernel,
    ParallelLoop,
    Reduce,
    Space,
    Stmt,
    Store,
    Var,
)
from coissue.kernels.stitch.render import Lines, Renderer, by_depth, indent, prelude

#: One partial result of each warp.
_PARTIAL_BYTES: Final = 8
_SEGMENT: Final = "struct co_segment {{ int64_t first_block, kernel; void* arrays[{}]; }};"


def segment_words(kernels: Sequence[LoopKernel]) -> int:
    """Words of 8 bytes per segment: first_block, kernel, and the pointers of the longest list."""
    return 2 + max(len(_globals(kernel)) for kernel in kernels)


def threads(kernels: Sequence[LoopKernel]) -> int:
    return max(kernel.threads for kernel in kernels)


def shared_bytes(kernel: LoopKernel) -> int:
    """The plan's buffers, and what reductions over the block need on top of them."""
    if not _reduces_over_block(kernel.body):
        return kernel.shared_bytes
    return _partials(kernel) + 2 * _PARTIAL_BYTES * (kernel.threads // WARP)


def render_cuda(kernels: Sequence[LoopKernel], name: str) -> str:
    """One `__global__` function that runs any of the kernels."""
    dialects = [CudaRenderer(kernel.threads) for kernel in kernels]
    parts = [_SEGMENT.format(segment_words(kernels) - 2)]
    pairs = zip(dialects, kernels, strict=True)
    parts += ["\n".join(dialect.kernel(kernel)) for dialect, kernel in pairs]
    return cuda_prelude() + "\n".join([*parts, *_launcher(kernels, name), ""])


def cuda_prelude() -> str:
    return prelude(CudaRenderer.HEADERS, "#define CO_CUDA")


def _launcher(kernels: Sequence[LoopKernel], name: str) -> Lines:
    """Finds the block's segment, and the kernel in it."""
    size, most = max(map(shared_bytes, kernels)), threads(kernels)
    body = ["unsigned char* const shared = nullptr;"]
    if size:
        body = [f"alignas(16) __shared__ unsigned char shared[{size}];"]
    body += [
        "int low = 0, high = count;  // the last segment that begins at or before this block",
        "while (high - low > 1) {",
        "  const int middle = (low + high) / 2;",
        "  if (segments[middle].first_block <= blockIdx.x) low = middle; else high = middle;",
        "}",
        "const co_segment* const segment = segments + low;",
        "const int64_t at = blockIdx.x - segment->first_block;",
    ]
    for place, kernel in enumerate(kernels):
        tests = [f"segment->kernel == {place}"] if len(kernels) > 1 else []
        tests += [f"threadIdx.x < {kernel.threads}"] if kernel.threads < most else []
        unit, block = "at", "0"
        if kernel.blocks > 1:
            unit, block = f"at / {kernel.blocks}", f"(int)(at % {kernel.blocks})"
        call = f"{kernel.name}_block(segment->arrays, {unit}, {block}, shared);"
        body.append(f"if ({' && '.join(tests)}) {call}" if tests else call)
    head = f'extern "C" __global__ void __launch_bounds__({most})'
    return [f"{head} {name}(const co_segment* segments, int count) {{", *indent(body), "}"]


class CudaRenderer(Renderer):
    INDEX: ClassVar[str] = "int"
    HEADERS: ClassVar[tuple[str, ...]] = ("types.h", "math_cuda.h", "scalars.h")

    def __init__(self, threads: int) -> None:
        if threads % WARP:
            raise ValueError(f"{threads} threads are not whole warps")
        self._threads = threads

    def kernel(self, kernel: LoopKernel) -> Lines:
        """What one block does."""
        head = (
            f"static __device__ void {kernel.name}_block(void* const* arrays, int64_t unit, "
            f"int {BLOCK.name}, unsigned char* shared) {{"
        )
        body: Lines = []
        for place, array in enumerate(_globals(kernel)):
            kind = ("" if array.is_output else "const ") + self.STORED[array.dtype]
            move = f" + unit * {array.elements}" if array.per_unit else ""
            value = f"({kind}*)arrays[{place}]{move}"
            body.append(f"{kind}* const __restrict__ {array.name} = {value};")
        for array in kernel.arrays:
            if array.space is Space.SHARED:
                kind = self.STORED[array.dtype]
                value = f"({kind}*)(shared + {array.offset_bytes})"
                body.append(f"{kind}* const {array.name} = {value};")
        if _reduces_over_block(kernel.body):
            body.append(f"unsigned char* const partials = shared + {_partials(kernel)};")
            body.append("int side = 0;")
        return [head, *indent([*body, *self.statements(kernel.body)]), "}"]

    def parallel(self, loop: ParallelLoop) -> Lines:
        """Turns taken by threads, by warps, or by the block (`loop.spread`)."""
        first, step = {
            "thread": ("threadIdx.x", self._threads),
            "warp": (f"threadIdx.x / {WARP}", self._threads // WARP),
            "block": ("0", 1),
        }[loop.spread]
        return self.strided(loop.vars, loop.extents, first, step, self.turn(loop))

    def turn(self, loop: ParallelLoop) -> Lines:
        """One turn; what a warp or the block has computed, its first thread stores."""
        body: Lines = []
        for statement in loop.body:
            lines = self.statement(statement)
            if isinstance(statement, Store) and loop.spread != "thread":
                lane = f"threadIdx.x % {WARP}" if loop.spread == "warp" else "threadIdx.x"
                lines = [f"if ({lane} == 0) {line}" for line in lines]
            body += lines
        return body

    def strided(
        self, vars_: Sequence[Var], extents: Sequence[int], first: str, step: int, body: Lines
    ) -> Lines:
        """All values of the variables as one loop from `first` in steps of `step`."""
        total = math.prod(extents)
        flat = vars_[0].name if len(vars_) == 1 else "turn"
        head = f"for (int {flat} = {first}; {flat} < {total}; {flat} += {step}) {{"
        return [head, *indent([*_coordinates(vars_, extents, flat), *body]), "}"]

    def reduce(self, reduce: Reduce) -> Lines:
        into, dtype = reduce.into.name, reduce.into.dtype
        start = self.expr(self.neutral(reduce.name, dtype))
        found = [f"{self.HELD[dtype]} {into} = {start};"]
        last = self.combined(reduce, into, self.expr(reduce.value))
        if reduce.spread == "thread":
            levels = by_depth(reduce.vars, reduce.body)
            return [*found, *self.turns(reduce.vars, reduce.extents, levels, [last])]
        body = [*self.statements(reduce.body), last]
        over_warp = reduce.spread == "warp"
        first = f"threadIdx.x % {WARP}" if over_warp else "threadIdx.x"
        step = WARP if over_warp else self._threads
        found += self.strided(reduce.vars, reduce.extents, first, step, body)
        other = f"__shfl_xor_sync(0xffffffffu, {into}, step)"
        found.append(f"for (int step = {WARP // 2}; step; step /= 2) {{")
        found += [*indent([self.combined(reduce, into, other)]), "}"]
        return found if over_warp else [*found, *self.across_warps(reduce)]

    def across_warps(self, reduce: Reduce) -> Lines:
        """One partial result per warp; the next reduction uses the other side."""
        into, warps = reduce.into.name, self._threads // WARP
        kind = self.STORED[reduce.into.dtype] if reduce.into.dtype == "bool" else (
            self.HELD[reduce.into.dtype]
        )  # fmt: skip
        partial = f"{into}_partial"
        return [
            f"{kind}* const {partial} = ({kind}*)partials + side * {warps};",
            "side ^= 1;",
            f"if (threadIdx.x % {WARP} == 0) {partial}[threadIdx.x / {WARP}] = {into};",
            "__syncthreads();",
            f"{into} = {partial}[0];",
            f"for (int warp = 1; warp < {warps}; ++warp) {{",
            *indent(
                [self.combined(reduce, into, f"({self.HELD[reduce.into.dtype]}){partial}[warp]")]
            ),
            "}",
        ]

    def barrier(self) -> Lines:
        return ["__syncthreads();"]


def _coordinates(vars_: Sequence[Var], extents: Sequence[int], flat: str) -> Lines:
    found: Lines = []
    inner = math.prod(extents)
    for place, (var, extent) in enumerate(zip(vars_, extents, strict=True)):
        inner //= extent
        near = f"{flat} / {inner}" if inner > 1 else flat
        value = near if place == 0 else f"{near} % {extent}"
        found.append(f"const int {var.name} = {value};")
    return found if len(vars_) > 1 else []


def _globals(kernel: LoopKernel) -> list[Array]:
    return [array for array in kernel.arrays if array.space is Space.GLOBAL]


def _partials(kernel: LoopKernel) -> int:
    return -(-kernel.shared_bytes // 16) * 16


def _reduces_over_block(body: Sequence[Stmt]) -> bool:
    return any(isinstance(s, ParallelLoop) and s.spread == "block" for s in body)
