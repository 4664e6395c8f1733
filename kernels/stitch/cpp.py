"""The C++ dialect: a stitched kernel as a function that vectorises under g++ and clang++.

Calling convention of every generated function:

    extern "C" void NAME(const void* const* in, void* const* out,
                         int64_t first_unit, int64_t last_unit)

`in` and `out` hold one pointer per GLOBAL array of the kernel, in order (`StitchedKernel.inputs`,
`.outputs`). An array that is `per_unit` starts at unit 0: unit u has its elements [u * elements,
(u + 1) * elements); others are the same for all units. Outputs must not overlap anything else.
Units do not touch each other, so calls with other units may run at the same time.

Errors of the vectorised float functions (`math_cpu.h`), in units in the last place, for all floats
including denormals, infinities and NaN: exp 2, log 2, log1p 3, sigmoid 3, tanh 3, erf 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from coissue.kernels.stitch.affine import BLOCK, INDEX
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
from coissue.kernels.stitch.merge import merge_loops
from coissue.kernels.stitch.render import Lines, Renderer, bare, by_depth, indent, read_header

#: -fwrapv: integers wrap. No flag that would change what NaN and infinity do. Loops are never
#: peeled for alignment: results must not depend on addresses.
FLAGS: Final = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno",
    "-fno-trapping-math", "-fwrapv", "-fno-strict-aliasing", "-fPIC", "-shared",
)  # fmt: skip

_UNIT: Final = Var("unit", INDEX)
_PRAGMA_REDUCTIONS: Final = "\n".join(
    f"#pragma omp declare reduction(co_{name} : float, double : "
    f"omp_out = co_{combine}(omp_out, omp_in)) initializer(omp_priv = omp_orig)"
    for name, combine in (("amax", "maximum"), ("amin", "minimum"))
)


def render_cpp(kernels: Sequence[LoopKernel]) -> str:
    """One translation unit with a function per kernel."""
    dialect = CppRenderer()
    parts = [*map(read_header, dialect.HEADERS), _PRAGMA_REDUCTIONS]
    return "\n".join([*parts, *("\n".join(dialect.kernel(kernel)) for kernel in kernels), ""])


class CppRenderer(Renderer):
    INDEX: ClassVar[str] = "int64_t"
    HEADERS: ClassVar[tuple[str, ...]] = ("types.h", "math_cpu.h", "scalars.h")
    #: What `#pragma omp simd reduction` calls each reduction.
    CLAUSES: ClassVar[dict[str, str]] = {
        "sum": "+", "prod": "*", "any": "|", "all": "&", "amax": "co_amax", "amin": "co_amin",
    }  # fmt: skip

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
        head = (
            f"for (int64_t {first} = first_unit * {times}; {first} < last_unit * {times}; "
            f"++{first}) {{"
        )
        pragma = ["#pragma omp simd"] if len(loop.vars) == 1 else []
        pointers = self.pointers(kernel, None, moved=False)
        return [*pointers, *self.statements(levels[0]), *pragma, head, *indent(body), "}"]

    def nest(
        self, vars_: Sequence[Var], extents: Sequence[int], levels: Sequence[Sequence[Stmt]]
    ) -> Lines:
        """Nested loops; what each statement needs is computed as far outside as possible."""
        body = self.statements(levels[0])
        if not vars_:
            return body
        inner = self.nest(vars_[1:], extents[1:], levels[1:])
        if len(vars_) == 1 and not any(isinstance(s, Reduce) for s in levels[1]):
            body = [*body, "#pragma omp simd"]
        return [*body, *self.loop(vars_[0], extents[0], inner)]

    def parallel(self, loop: ParallelLoop) -> Lines:
        body = self.nest(loop.vars, loop.extents, by_depth(loop.vars, loop.body))
        return ["{", *indent(body), "}"]

    def reduce(self, reduce: Reduce) -> Lines:
        into, dtype = reduce.into.name, reduce.into.dtype
        start = self.expr(self.neutral(reduce.name, dtype))
        levels = by_depth(reduce.vars, reduce.body)
        combine = self.combined(reduce.name, into, bare(self.expr(reduce.value)))
        clause = f"#pragma omp simd reduction({self.clause(reduce)} : {into})"
        return [
            f"{self.HELD[dtype]} {into} = {start};",
            *self.turns(reduce.vars, reduce.extents, levels, combine, clause),
        ]

    def clause(self, reduce: Reduce) -> str:
        floats = reduce.into.dtype in ("f16", "bf16", "f32", "f64")
        return (
            self.CLAUSES[reduce.name] if floats else self.CLAUSES[reduce.name].replace("co_a", "")
        )

    def turns(
        self,
        vars_: Sequence[Var],
        extents: Sequence[int],
        levels: Sequence[Sequence[Stmt]],
        combine: str,
        clause: str,
    ) -> Lines:
        body = self.statements(levels[0])
        if not vars_:
            return [*body, combine]
        inner = self.turns(vars_[1:], extents[1:], levels[1:], combine, clause)
        pragma = len(vars_) == 1 and not any(isinstance(s, Reduce) for s in levels[1])
        return [*body, *([clause] if pragma else []), *self.loop(vars_[0], extents[0], inner)]

    def barrier(self) -> Lines:
        """One thread runs a block: all that was written is there."""
        return []


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
