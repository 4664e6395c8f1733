"""The IR: a tenant's model as data. Ops in SSA form, typed, without weights.

Rules: data only, no behaviour beyond sizes; no torch. Made by capture, checked by `spec`, given
meaning by `interpreter`, rewritten by `passes`. Dimension letters, used in every docstring of the
project: R = rows of one request, T = tokens per row of one request, H, N, K = fixed sizes.

A value is an index into `Program.types`. Inputs, weights and op outputs each define values exactly
once; an op may use only values defined before it. `ABSENT` stands for an optional input not given.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

#: Version of the stored form; a program of another version is refused with both numbers named.
PROGRAM_VERSION: Final = 1
#: The value id of an optional op input that is not given.
ABSENT: Final = -1

#: Every dtype of the IR with its bytes per element (little-endian, as on the wire).
DTYPE_BYTES: Final[dict[str, int]] = {
    "bool": 1, "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip

AttrValue = bool | int | float | str | tuple[int, ...] | None


class Dim(msgspec.Struct, frozen=True, array_like=True):
    """One extent: `scale * R**rows * T**tokens`. A fixed extent has both powers zero."""

    scale: int
    rows: int = 0
    tokens: int = 0

    @property
    def is_fixed(self) -> bool:
        return self.rows == 0 and self.tokens == 0

    def at(self, rows: int, tokens: int) -> int:
        """The extent of a request with `rows` rows of `tokens` tokens each."""
        return self.scale * int(rows**self.rows) * int(tokens**self.tokens)


#: The extents R and T themselves.
R: Final = Dim(1, rows=1)
T: Final = Dim(1, tokens=1)


class Type(msgspec.Struct, frozen=True):
    """Shape and dtype of a value, as one request sees it."""

    shape: tuple[Dim, ...]
    dtype: str

    @property
    def is_fixed(self) -> bool:
        return all(dim.is_fixed for dim in self.shape)

    def at(self, rows: int, tokens: int) -> tuple[int, ...]:
        """The concrete shape for `rows` rows of `tokens` tokens."""
        return tuple(dim.at(rows, tokens) for dim in self.shape)

    def num_bytes(self, rows: int, tokens: int) -> int:
        return math.prod(self.at(rows, tokens)) * DTYPE_BYTES[self.dtype]


class Op(msgspec.Struct, frozen=True):
    """One node. `where` is the module path in the tenant's model, for messages."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: dict[str, AttrValue] = {}
    where: str = ""


class Port(msgspec.Struct, frozen=True):
    """A named input or output of the program."""

    name: str
    value: int


class Weight(msgspec.Struct, frozen=True):
    """A weight by content: `digest` is the SHA-256 of dtype, shape and bytes, in hex."""

    name: str
    value: int
    digest: str


class Program(msgspec.Struct, frozen=True):
    """A tenant's model. `types[v]` is the type of value v.

    `rows_limit` and `tokens_limit` are the largest R and T the model was captured for
    (`tokens_limit` 0: the model has no token axis). `inputs` are in call order.
    """

    name: str
    types: tuple[Type, ...]
    inputs: tuple[Port, ...]
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Port, ...]
    rows_limit: int
    tokens_limit: int = 0
    version: int = PROGRAM_VERSION


def fixed(*shape: int) -> tuple[Dim, ...]:
    """Shorthand for a shape without R or T."""
    return tuple(Dim(extent) for extent in shape)


def encode_program(program: Program) -> bytes:
    return msgspec.msgpack.encode(program)


def decode_program(data: bytes) -> Program:
    """The program in `data`. Raises `msgspec.DecodeError` (a sentence) on anything else.

    Only the form is checked here; `spec.check_program` checks the meaning.
    """
    return msgspec.msgpack.decode(data, type=Program)
