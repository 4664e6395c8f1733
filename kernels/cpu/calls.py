"""Calls of generated functions (`stitch/cpp.py`): by `calling.c`, or by ctypes where that was not
compiled, which takes ten times as long."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Final, Protocol

_NATIVE: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
)


class Caller(Protocol):
    def __call__(
        self, function: int, places: bytes, inputs: int, addresses: list[int], first: int, last: int
    ) -> None:
        """Run the function at that address on the units from `first` to before `last`, without the
        GIL. `places` (`pack_places`): of its pointers among `addresses`, of which the `inputs`
        first ones are read, the others written."""


def pack_places(places: Sequence[int]) -> bytes:
    return struct.pack(f"{len(places)}i", *places)


def call_by_ctypes(
    function: int, places: bytes, inputs: int, addresses: list[int], first: int, last: int
) -> None:
    found = [addresses[place] for place in struct.unpack(f"{len(places) // 4}i", places)]
    pointers = (ctypes.c_void_p * len(found))(*found)
    outputs = ctypes.addressof(pointers) + inputs * ctypes.sizeof(ctypes.c_void_p)
    _NATIVE(function)(ctypes.addressof(pointers), outputs, first, last)


def address_of(function: Any) -> int:
    """Of a function of a `ctypes.CDLL`, which must stay loaded."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


call: Caller
try:
    from coissue.kernels.cpu.calling import call
except ImportError:
    call = call_by_ctypes
