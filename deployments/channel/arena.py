"""Shared memory for large tensors: made, owned and divided by the client, mapped by the server.

The memory is a memfd, sealed so that it can never shrink, and the server opens it as
`/proc/<pid of the peer>/fd/<number>`, the pid coming from the kernel. So there is no file to leak,
whoever is killed when, and a client cannot fault the server by truncating it. The mapping lives as
long as any array on it: a late write of the server for a client that is gone goes nowhere.
Where the server cannot see the client's process (another pid namespace), tensors go inline.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import stat
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from coissue.deployments.channel.checking import MALFORMED, InferError
from coissue.deployments.channel.frames import ALIGN, NUMPY_DTYPES, TensorRef
from coissue.deployments.channel.framing import tensor_bytes

#: Every tensor in an arena starts at a multiple of this.
ARENA_ALIGN: Final = 64
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def round_up(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ARENA_ALIGN


class Mapping:
    """Shared bytes and the arrays on them."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._bytes = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)

    def view(self, dtype: str, shape: Sequence[int], offset: int) -> np.ndarray:
        """The tensor at `offset`. Raises `InferError` if it is not inside the arena."""
        kind = NUMPY_DTYPES[dtype]
        size = math.prod(shape) * kind.itemsize
        if offset % ARENA_ALIGN or not 0 <= offset <= self.num_bytes - size:
            raise InferError(
                MALFORMED,
                f"arena offset {offset} of {size} bytes, allowed: multiples of {ARENA_ALIGN} "
                f"from 0 to {self.num_bytes - size}",
            )
        return self._bytes[offset : offset + size].view(kind).reshape(shape)


class Arena(Mapping):
    """The client's side: reserves and releases blocks, first fit."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("coissue-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(self.fd, num_bytes)
        except BaseException:
            self.close_fd()
            raise
        #: Free (offset, size), sorted, never adjacent.
        self._free: list[tuple[int, int]] = [(0, num_bytes)]
        #: Size of each reserved block by offset.
        self._reserved: dict[int, int] = {}

    def reserve(self, num_bytes: int) -> int | None:
        """Offset of a new block, or None if there is no room."""
        size = max(ARENA_ALIGN, round_up(num_bytes))
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = (
                    [(offset + size, free - size)] if free > size else []
                )
                self._reserved[offset] = size
                return offset
        return None

    def release(self, offset: int) -> None:
        size = self._reserved.pop(offset)
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            before = self._free.pop(index)
            offset, size = before[0], before[1] + size
        self._free.insert(index, (offset, size))

    def close_fd(self) -> None:
        """Once the server has mapped it (or will not), the descriptor is not needed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_peer_arena(pid: int, fd: int, num_bytes: int, limit: int) -> Mapping:
    """Maps the arena a client offers. Raises `OSError` with a sentence if it is not a sound one."""
    if not 0 < num_bytes <= limit:
        raise OSError(f"arena of {num_bytes} bytes, allowed: 1 to {limit}")
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise OSError("arena is not a regular file of this user")
        if found.st_size != num_bytes:
            raise OSError(f"arena has {found.st_size} bytes, not {num_bytes}")
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("arena is not sealed against shrinking")
        return Mapping(opened, num_bytes)
    finally:
        os.close(opened)


def take_tensors(
    refs: Sequence[TensorRef], body: memoryview | bytes, arena: Mapping | None
) -> list[np.ndarray]:
    """Arrays (not copied) of tensors whose dtypes and shapes were checked before."""
    arrays, end = [], 0
    for ref in refs:
        if ref.offset >= 0:
            if arena is None:
                raise InferError(MALFORMED, f"arena offset {ref.offset}, but there is no arena")
            arrays.append(arena.view(ref.dtype, ref.shape, ref.offset))
            continue
        start = end + -end % ALIGN
        end = start + tensor_bytes(ref)
        if end > len(body):
            break
        arrays.append(np.ndarray(ref.shape, NUMPY_DTYPES[ref.dtype], body, start))
    if end != len(body):
        raise InferError(MALFORMED, f"body of {len(body)} bytes, but its tensors need {end}")
    return arrays
