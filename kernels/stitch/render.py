"""From loops to source text: the one renderer of statements and expressions; dialects fill it in.

Rules: a dialect is a subclass; what differs only in words is a class attribute. Values that no
variable of an inner loop changes are computed outside of it (`by_depth`). A name is bound once, so
moving it out can change nothing: turns of a loop never read what another turn writes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from coissue.kernels.interpreter import store
from coissue.kernels.stitch.loops import (
    Barrier,
    Call,
    Const,
    Expr,
    Let,
    Load,
    ParallelLoop,
    Reduce,
    Stmt,
    Store,
    Var,
)
from coissue.kernels.stitch.merge import variables

Lines = list[str]

_FLOATS: Final = ("f16", "bf16", "f32", "f64")
_INFIX: Final = {
    "add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "floordiv": "/", "mod": "%",
}  # fmt: skip
#: Of bools.
_LOGIC: Final = {"add": "|", "mul": "&", "maximum": "|", "minimum": "&"}
_LOGICAL: Final = {"logical_and": "&", "logical_or": "|"}
#: How two partial results of a reduction become one, by an operator or a function.
COMBINE: Final = {
    "sum": "{0} + {1}", "prod": "{0} * {1}", "any": "{0} | {1}", "all": "{0} & {1}",
    "amax": "co_maximum({1}, {0})", "amin": "co_minimum({1}, {0})",
}  # fmt: skip
BOOL_COMBINE: Final = {"any": "{0} | {1}", "all": "{0} & {1}", "amax": "{0} | {1}",
                       "amin": "{0} & {1}"}  # fmt: skip


@cache
def read_header(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def prelude(headers: Sequence[str], *lines: str) -> str:
    """What a translation unit begins with."""
    return "\n".join([*lines, *map(read_header, headers)]) + "\n"


def indent(lines: Sequence[str]) -> Lines:
    return ["  " + line for line in lines]


class Renderer(ABC):
    #: In memory, and in a variable: arithmetic of the 16-bit floats is in float.
    STORED: ClassVar[dict[str, str]] = {
        "bool": "uint8_t", "u8": "uint8_t", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t",
        "i64": "int64_t", "f16": "co_f16", "bf16": "co_bf16", "f32": "float", "f64": "double",
    }  # fmt: skip
    HELD: ClassVar[dict[str, str]] = STORED | {"bool": "bool", "f16": "float", "bf16": "float"}
    #: Type of loop variables.
    INDEX: ClassVar[str]
    HEADERS: ClassVar[tuple[str, ...]]

    # Expressions.

    def expr(self, expr: Expr) -> str:
        match expr:
            case Const(value=value, dtype=dtype):
                return self.literal(value, dtype)
            case Var(name=name):
                return name
            case Load(array=array, index=index):
                return f"{array}[{bare(self.expr(index))}]"
            case Call():
                return self.call(expr)

    def call(self, call: Call) -> str:
        args = [self.expr(arg) for arg in call.args]
        source = call.args[0].dtype
        match call.name:
            case "select":
                return f"({args[0]} ? {args[1]} : {args[2]})"
            case "cast":
                return self.cast(args[0], call.dtype)
            case "identity":
                return args[0]
            case "neg":
                return f"({self.HELD[call.dtype]})(-{args[0]})"
            case "div" if source not in _FLOATS:
                return f"((double){args[0]} / (double){args[1]})"
            case "div":
                return f"({args[0]} / {args[1]})"
            case "logical_not":
                return f"({args[0]} == 0)"
            case "logical_and" | "logical_or":
                return f"(({args[0]} != 0) {_LOGICAL[call.name]} ({args[1]} != 0))"
            case "pow" if source in _FLOATS and (times := _small_power(call.args[1])):
                return f"({' * '.join([args[0]] * times)})"
        if source == "bool" and call.name in _LOGIC:
            return f"({args[0]} {_LOGIC[call.name]} {args[1]})"
        if call.name in _INFIX:
            return f"({args[0]} {_INFIX[call.name]} {args[1]})"
        typed = [self.typed(arg) for arg in call.args]
        return f"co_{call.name}({', '.join(typed)})"

    def typed(self, expr: Expr) -> str:
        """An argument of a template: of the type that it is held in."""
        text = bare(self.expr(expr))
        return f"(int64_t)({text})" if isinstance(expr, Const) and expr.dtype == "i64" else text

    def cast(self, value: str, dtype: str) -> str:
        if dtype == "bool":
            return f"({value} != 0)"
        if dtype in ("f16", "bf16"):
            return f"co_round_{dtype}((float){value})"
        return f"(({self.HELD[dtype]}){value})"

    def literal(self, value: float | int | bool, dtype: str) -> str:
        if dtype in _FLOATS:
            with np.errstate(over="ignore"):
                kept = float(store(np.asarray(float(value)), dtype))
            suffix = "" if dtype == "f64" else "f"
            if math.isnan(kept):
                return f"({self.HELD[dtype]})CO_NAN"
            if math.isinf(kept):
                return f"({self.HELD[dtype]})({'-' if kept < 0 else ''}CO_INF)"
            return f"({kept!r}{suffix})" if kept < 0 or str(kept)[0] == "-" else f"{kept!r}{suffix}"
        if dtype == "bool":
            return "true" if value else "false"
        number = int(value)
        if dtype == "i64" and abs(number) < 2**31:
            return str(number) if number >= 0 else f"({number})"
        text = "(-9223372036854775807LL - 1)" if number == -(2**63) else f"{number}LL"
        return f"(({self.HELD[dtype]}){text})"

    def neutral(self, name: str, dtype: str) -> Const:
        """What a reduction starts from."""
        if name in ("amax", "amin"):
            if dtype in _FLOATS:
                return Const(-math.inf if name == "amax" else math.inf, dtype)
            if dtype == "bool":
                return Const(name == "amin", dtype)
            info = np.iinfo({"u8": "u1"}.get(dtype, f"i{int(dtype[1:]) // 8}"))
            return Const(int(info.min if name == "amax" else info.max), dtype)
        return Const(name in ("prod", "all"), dtype)

    # Statements.

    def statements(self, statements: Sequence[Stmt]) -> Lines:
        return [line for statement in statements for line in self.statement(statement)]

    def statement(self, statement: Stmt) -> Lines:
        match statement:
            case Let(var=var, value=value):
                return [f"const {self.HELD[var.dtype]} {var.name} = {bare(self.expr(value))};"]
            case Store(array=array, index=index, value=value):
                return [f"{array}[{bare(self.expr(index))}] = {bare(self.expr(value))};"]
            case Reduce():
                return self.reduce(statement)
            case ParallelLoop():
                return self.parallel(statement)
            case Barrier():
                return self.barrier()

    @abstractmethod
    def reduce(self, reduce: Reduce) -> Lines: ...

    @abstractmethod
    def parallel(self, loop: ParallelLoop) -> Lines: ...

    @abstractmethod
    def barrier(self) -> Lines: ...

    def loop(self, var: Var, extent: int, body: Sequence[str]) -> Lines:
        head = f"for ({self.INDEX} {var.name} = 0; {var.name} < {extent}; ++{var.name}) {{"
        return [head, *indent(body), "}"]

    def turns(
        self,
        vars_: Sequence[Var],
        extents: Sequence[int],
        levels: Sequence[Sequence[Stmt]],
        last: Lines,
    ) -> Lines:
        """The loops of a reduction around `last`."""
        body = self.statements(levels[0])
        if not vars_:
            return [*body, *last]
        inner = self.turns(vars_[1:], extents[1:], levels[1:], last)
        return [*body, *self.loop(vars_[0], extents[0], inner)]

    def combined(self, reduce: Reduce, into: str, value: str) -> str:
        rule = BOOL_COMBINE if reduce.into.dtype == "bool" else COMBINE
        return f"{into} = {rule[reduce.name].format(into, value)};"


def _small_power(exponent: Expr) -> int:
    """2 or 3 if that is the constant exponent, else 0."""
    small = isinstance(exponent, Const) and exponent.value in (2, 3)
    return int(exponent.value) if isinstance(exponent, Const) and small else 0


def bare(text: str) -> str:
    """Without the outermost parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]


def by_depth(
    vars_: Sequence[Var], body: Sequence[Stmt], bound: Mapping[Var, int] | None = None
) -> list[list[Stmt]]:
    """Per number of loops entered: the statements that need no more of them. Stores come last.

    `bound`: the depth of variables bound before."""
    depths = {**(bound or {}), **{var: depth for depth, var in enumerate(vars_, 1)}}
    levels: list[list[Stmt]] = [[] for _ in range(len(vars_) + 1)]
    for statement in body:
        depth = max((depths.get(var, 0) for var in variables(statement)), default=0)
        if isinstance(statement, Store):
            depth = len(vars_)
        elif isinstance(statement, Let | Reduce):
            depths[statement.var if isinstance(statement, Let) else statement.into] = depth
        levels[depth].append(statement)
    return levels
