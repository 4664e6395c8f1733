"""The C++ dialect: a stitched kernel as a function that vectorises under g++ and clang++.

Calling convention of every generated function:

    extern "C" void NAME(const void* const* in, void* const* out,
                         int64_t first_unit, int64_t last_unit)

`in` and `out` hold one pointer per GLOBAL array of the kernel, in order (`StitchedKernel.inputs`,
`.outputs`). An array that is `per_unit` starts at unit 0: unit u has its elements [u * elements,
(u + 1) * elements); others are the same for all units. Outputs must not overlap anything else.
Units do not touch each other, so calls with other units may run at the same time.

Errors of the vectorised float functions (`math_cpu.h`), in units in the last place, for all floats
including denormals, infinities and NaN: exp 2, log 2, log1p 2, sigmoid 3, tanh 3, erf 3.
1 + erf(x), where both are in one loop, is within 4e-7; and within 2e-6 of its value, plus 2e-8.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from coissue.kernels.ir import DTYPE_BYTES
from coissue.kernels.stitch.affine import BLOCK, INDEX, of
from coissue.kernels.stitch.loops import (
    Array,
    Call,
    Const,
    Expr,
    Let,
    Load,
    LoopKernel,
    ParallelLoop,
    Reduce,
    Space,
    Stmt,
    Store,
    Var,
)
from coissue.kernels.stitch.merge import loads_of, merge_loops, variables
from coissue.kernels.stitch.render import (
    Lines,
    Renderer,
    by_depth,
    indent,
    prelude,
)

#: -fwrapv: integers wrap. No flag that would change what NaN and infinity do. Loops are never
#: peeled for alignment: results must not depend on addresses. Unrolled, for polynomials are chains,
#: and with whole AVX-512 registers, which g++ avoids unless told: GELU takes 0.6 of the time.
FLAGS: Final = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno",
    "-fno-trapping-math", "-fwrapv", "-fno-strict-aliasing", "-fPIC", "-shared",
    "--param=vect-max-peeling-for-alignment=0", "-funroll-loops",
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)  # fmt: skip

_UNIT: Final = Var("unit", INDEX)
_SIMD: Final = "#pragma omp simd"
#: Partial results of a reduction: as many bytes as two to four vector registers have.
_LANE_BYTES: Final = 256
#: Shorter loops are not worth lanes.
_SHORT: Final = 8
HEADERS: Final = ("types.h", "math_cpu.h", "scalars.h")


def render_cpp(kernels: Sequence[LoopKernel]) -> str:
    """One translation unit with a function per kernel."""
    parts = ("\n".join(CppRenderer().kernel(kernel)) + "\n" for kernel in kernels)
    return prelude(HEADERS) + "".join(parts)


class CppRenderer(Renderer):
    INDEX: ClassVar[str] = "int64_t"
    #: Partial results that are held otherwise in an array.
    LANES: ClassVar[dict[str, str]] = {"bool": "uint8_t"}

    def kernel(self, kernel: LoopKernel) -> Lines:
        head = (
            f'extern "C" void {kernel.name}(const void* const* in, void* const* out, '
            "int64_t first_unit, int64_t last_unit) {"
        )
        flat = _flatten(kernel)
        body = self.flat(kernel, flat) if flat else self.grid(kernel)
        return [head, *indent(body), "}"]

    def grid(self, kernel: LoopKernel) -> Lines:
        """The grid as two loops: units, and blocks of a unit."""
        fixed = [*self.pointers(kernel, per_unit=False)]
        if kernel.shared_bytes:
            fixed.append(f"alignas(64) unsigned char shared[{kernel.shared_bytes}];")
        for array in kernel.arrays:
            if array.space is Space.SHARED:
                pointer = f"{self.STORED[array.dtype]}*"
                place = f"shared + {array.offset_bytes}"
                fixed.append(f"{pointer} const {array.name} = ({pointer})({place});")
        body = self.statements(kernel.body)
        if kernel.blocks > 1:
            body = self.loop(BLOCK, kernel.blocks, body)
        units = "for (int64_t unit = first_unit; unit < last_unit; ++unit) {"
        return [*fixed, units, *indent([*self.pointers(kernel, per_unit=True), *body]), "}"]

    def pointers(self, kernel: LoopKernel, per_unit: bool | None, moved: bool = True) -> Lines:
        """One pointer per GLOBAL array; `per_unit` None: all. `moved`: to the unit's elements."""
        found: Lines = []
        counts = {True: 0, False: 0}
        for array in kernel.arrays:
            if array.space is Space.SHARED:
                continue
            place = counts[array.is_output]
            counts[array.is_output] += 1
            if per_unit in (None, array.per_unit):
                move = f" + unit * {array.elements}" if array.per_unit and moved else ""
                found.append(self.pointer(array, place) + move + ";")
        return found

    def pointer(self, array: Array, place: int) -> str:
        kind = self.STORED[array.dtype] if array.is_output else f"const {self.STORED[array.dtype]}"
        source = "out" if array.is_output else "in"
        return f"{kind}* const __restrict {array.name} = ({kind}*){source}[{place}]"

    def flat(self, kernel: LoopKernel, loop: ParallelLoop) -> Lines:
        """An element-wise kernel: the units are only one more loop, or part of one."""
        first, times = loop.vars[0].name, loop.extents[0]
        levels = by_depth(loop.vars, loop.body)
        body = self.nest(loop.vars[1:], loop.extents[1:], levels[1:])
        start, end = (
            f"{n}_unit * {times}" if times > 1 else f"{n}_unit" for n in ("first", "last")
        )
        head = f"for (int64_t {first} = {start}; {first} < {end}; ++{first}) {{"
        pragma = [_SIMD] if len(loop.vars) == 1 else []
        pointers = self.pointers(kernel, None, moved=False)
        return [*pointers, *self.statements(levels[0]), *pragma, head, *indent(body), "}"]

    def nest(
        self, vars_: Sequence[Var], extents: Sequence[int], levels: Sequence[Sequence[Stmt]]
    ) -> Lines:
        """Nested loops; what each statement needs is computed as far outside as possible."""
        body = self.statements(levels[0])
        if not vars_:
            return body
        if len(vars_) == 1 and _is_column(vars_[0], extents[0], levels[1]):
            return [*body, *self.column(vars_[0], extents[0], levels[1])]
        inner = self.nest(vars_[1:], extents[1:], levels[1:])
        if len(vars_) == 1 and not any(isinstance(s, Reduce) for s in levels[1]):
            body = [*body, _SIMD]
        return [*body, *self.loop(vars_[0], extents[0], inner)]

    def parallel(self, loop: ParallelLoop) -> Lines:
        body = self.nest(loop.vars, loop.extents, by_depth(loop.vars, loop.body))
        return ["{", *indent(body), "}"]

    def reduce(self, reduce: Reduce) -> Lines:
        """In the order of memory, with lanes where the innermost loop is long enough.

        The order of additions depends on the extents alone: not on addresses, nor the machine."""
        levels = by_depth(reduce.vars, reduce.body)
        nested = any(isinstance(s, Reduce) for s in levels[-1])
        into, dtype = reduce.into.name, reduce.into.dtype
        if nested or not reduce.extents or reduce.extents[-1] < _SHORT:
            start = self.expr(self.neutral(reduce.name, dtype))
            last = self.combined(reduce, into, self.expr(reduce.value))
            turns = self.turns(reduce.vars, reduce.extents, levels, [last])
            return [f"{self.HELD[dtype]} {into} = {start};", *turns]
        lanes, extent, var = _lanes(reduce), reduce.extents[-1], reduce.vars[-1]
        partial = f"{into}_lanes"
        last = self.combined(reduce, f"{partial}[lane]", self.expr(reduce.value))
        inner = self.chunks(var, extent, lanes, [*self.statements(levels[-1]), last])
        turns = self.turns(reduce.vars[:-1], reduce.extents[:-1], levels[:-1], inner)
        halves: Lines = []
        while lanes > 4:
            lanes //= 2
            fold = self.combined(reduce, f"{partial}[lane]", f"{partial}[lane + {lanes}]")
            halves += self.lane_loop(lanes, [fold])
        while lanes > 1:  # too few for a vector
            lanes //= 2
            halves += [
                self.combined(reduce, f"{partial}[{lane}]", f"{partial}[{lane + lanes}]")
                for lane in range(lanes)
            ]
        result = f"const {self.HELD[dtype]} {into} = {partial}[0];"
        return [*self.start_lanes(reduce, _lanes(reduce)), *turns, *halves, result]

    def start_lanes(self, reduce: Reduce, lanes: int) -> Lines:
        dtype, partial = reduce.into.dtype, f"{reduce.into.name}_lanes"
        start = self.expr(self.neutral(reduce.name, dtype))
        declared = f"{self.LANES.get(dtype, self.HELD[dtype])} {partial}[{lanes}];"
        return [declared, *self.lane_loop(lanes, [f"{partial}[lane] = {start};"])]

    def lane_loop(self, lanes: int, body: Lines) -> Lines:
        return [_SIMD, f"for (int64_t lane = 0; lane < {lanes}; ++lane) {{", *indent(body), "}"]

    def chunks(self, var: Var, extent: int, lanes: int, body: Lines) -> Lines:
        """`body` for every value of `var`, whose remainder by `lanes` is `lane`."""
        whole, first = extent // lanes * lanes, f"{var.name}_first"
        found: Lines = []
        if whole:
            turn = self.lane_loop(lanes, [f"const int64_t {var.name} = {first} + lane;", *body])
            head = f"for (int64_t {first} = 0; {first} < {whole}; {first} += {lanes}) {{"
            found = [head, *indent(turn), "}"]
        if extent > whole:
            turn = [f"const int64_t {var.name} = {whole} + lane;", *body]
            found += self.lane_loop(extent - whole, turn)
        return found

    def column(self, var: Var, extent: int, body: Sequence[Stmt]) -> Lines:
        """A loop whose reductions walk memory in long steps, while its own variable walks in short
        ones: a lane is a value of `var`, and every reduction goes through the memory once."""
        lanes = min(extent, _lanes(*(s for s in body if isinstance(s, Reduce))))
        first, whole = f"{var.name}_first", extent // lanes * lanes
        head = f"for (int64_t {first} = 0; {first} < {whole}; {first} += {lanes}) {{"
        found = [head, *indent(self.column_part(var, first, lanes, body)), "}"]
        if extent > whole:
            part = self.column_part(var, first, extent - whole, body)
            found += ["{", *indent([f"const int64_t {first} = {whole};", *part]), "}"]
        return found

    def column_part(self, var: Var, first: str, lanes: int, body: Sequence[Stmt]) -> Lines:
        known, found = [f"const int64_t {var.name} = {first} + lane;"], []
        bound: dict[Var, int] = {}
        for statement in body:
            if isinstance(statement, Let):
                known += self.statement(statement)
                bound[statement.var] = 1
            elif isinstance(statement, Reduce):
                found += self.column_reduce(statement, var, lanes, known, bound)
                into = statement.into
                known.append(
                    f"const {self.HELD[into.dtype]} {into.name} = {into.name}_lanes[lane];"
                )
                bound[into] = 1
        stores = self.statements([s for s in body if isinstance(s, Store)])
        return [*found, *self.lane_loop(lanes, [*known, *stores])]

    def column_reduce(
        self, reduce: Reduce, var: Var, lanes: int, known: Lines, bound: Mapping[Var, int]
    ) -> Lines:
        deepest = len(reduce.vars) + 1
        here = dict.fromkeys(bound, deepest)
        levels = by_depth((*reduce.vars, var), reduce.body, here)
        last = self.combined(reduce, f"{reduce.into.name}_lanes[lane]", self.expr(reduce.value))
        inner = self.lane_loop(lanes, [*known, *self.statements(levels[-1]), last])
        turns = self.turns(reduce.vars, reduce.extents, levels[:-1], inner)
        return [*self.start_lanes(reduce, lanes), *turns]

    def barrier(self) -> Lines:
        """One thread runs a block: all that was written is there."""
        return []


def _lanes(*reduces: Reduce) -> int:
    """Partial results side by side: a power of two, not more than there are elements."""
    width = max(DTYPE_BYTES[reduce.into.dtype] for reduce in reduces)
    most = _LANE_BYTES // max(width, 4)
    if len(reduces) > 1 or not reduces[0].extents:
        return most
    return min(most, 1 << (reduces[0].extents[-1] - 1).bit_length())


def _is_column(var: Var, extent: int, body: Sequence[Stmt]) -> bool:
    """Whether lanes of `var` read memory in a row where those of its reductions would not."""
    reduces = [s for s in body if isinstance(s, Reduce)]
    inside = [s for reduce in reduces for s in reduce.body]
    if not reduces or extent < _SHORT or any(isinstance(s, Reduce) for s in inside):
        return False
    loads = [load for s in reduces for load in loads_of(s)]
    along_rows = all(
        _steps(load, reduce.vars[-1]) in (0, 1) and reduce.extents[-1] >= _SHORT
        for reduce in reduces
        if reduce.vars
        for load in loads_of(reduce)
    )
    return not along_rows and all(_steps(load, var) in (0, 1) for load in loads)


def _steps(load: Load, var: Var) -> int | None:
    """Elements from one value of the variable to the next; None if not always the same."""
    factors = of(load.index)
    if var not in factors and var in set(variables(Let(var, load.index))):
        return None
    return factors.get(var, 0)


def _flatten(kernel: LoopKernel) -> ParallelLoop | None:
    """An element-wise kernel as one nest of loops, units and blocks included; else None."""
    if len(kernel.body) != 1 or any(array.space is Space.SHARED for array in kernel.arrays):
        return None
    (loop,) = kernel.body
    if not isinstance(loop, ParallelLoop) or any(isinstance(s, Reduce) for s in loop.body):
        return None
    elements = {a.name: a.elements for a in kernel.arrays if a.per_unit}
    body = tuple(_with_unit(statement, elements) for statement in loop.body)
    blocks = ((BLOCK,), (kernel.blocks,)) if kernel.blocks > 1 else ((), ())
    vars_, extents = (_UNIT, *blocks[0], *loop.vars), (1, *blocks[1], *loop.extents)
    return merge_loops(replace(loop, vars=vars_, extents=extents, body=body))


def _with_unit(statement: Stmt, elements: dict[str, int]) -> Stmt:
    """The statement with indices that count from unit 0."""

    def move(array: str, index: Expr) -> Expr:
        if array not in elements:
            return index
        unit = Call("mul", (_UNIT, Const(elements[array], INDEX)), INDEX)
        return Call("add", (unit, index), INDEX)

    def change(expr: Expr) -> Expr:
        match expr:
            case Load(array=array, index=index, dtype=dtype):
                return Load(array, move(array, change(index)), dtype)
            case Call(name=name, args=args, dtype=dtype):
                return Call(name, tuple(map(change, args)), dtype)
            case _:
                return expr

    match statement:
        case Let(var=var, value=value):
            return Let(var, change(value))
        case Store(array=array, index=index, value=value):
            return Store(array, move(array, change(index)), change(value))
        case _:
            return statement
