"""Keeps memory that tensors gave back in the process, for the next launch's.

By default glibc returns what lies free at a heap's end once it is some tens of megabytes, and a
launch of many requests then finds its inputs and outputs page by page, each a fault: of 8,192 rows
of 256 numbers 2,370 faults, a third of the time (decision 015).
"""

from __future__ import annotations

import ctypes

#: Numbers of glibc's `mallopt`. Setting one stops it from moving the others.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Bytes that may lie free at a heap's end.
_KEPT_BYTES = 1 << 28
#: Larger tensors are mapped, and returned, each by itself; glibc takes no more.
_MAPPED_BYTES = 1 << 25


def keep_freed_memory() -> bool:
    """For the whole process; False where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = (_MMAP_THRESHOLD, _MAPPED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES)
    return mallopt is not None and all(mallopt(*option) == 1 for option in options)
