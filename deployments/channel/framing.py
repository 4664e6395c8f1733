"""Messages to bytes and back: see `frames` for what a frame is.

Rules: no I/O here. Sizes are checked before anything is allocated for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from coissue.deployments.channel.frames import (
    ALIGN,
    CHUNK_BYTES,
    INLINE_BYTES,
    PREFIX,
    Body,
    FrameError,
    Message,
    TensorRef,
)
from coissue.kernels.ir import DTYPE_BYTES

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_ZEROS: Final = bytes(ALIGN)


def tensor_bytes(ref: TensorRef) -> int:
    return math.prod(ref.shape) * DTYPE_BYTES[ref.dtype]


def frame_buffers(message: Message, arrays: Sequence[np.ndarray] = ()) -> list[bytes | memoryview]:
    """The frame of `message` with C-contiguous `arrays` in its body, as buffers to be written.

    Small frames are one buffer; large tensors are not copied.
    """
    header = _ENCODE(message)
    size = PREFIX.size + len(header)
    if not arrays:
        return [PREFIX.pack(size, len(header)) + header]
    parts: list[bytes | memoryview] = [b"", header]
    for array in arrays:
        pad = -size % ALIGN
        parts.append(_ZEROS[:pad])
        is_small = array.nbytes <= INLINE_BYTES
        parts.append(array.tobytes() if is_small else array.reshape(-1).view(np.uint8).data)
        size += pad + array.nbytes
    if size >= 1 << 32:
        raise FrameError(f"a frame of {size} bytes cannot be written, at most {(1 << 32) - 1}")
    parts[0] = PREFIX.pack(size, len(header))
    return [b"".join(parts)] if size <= INLINE_BYTES * 2 else parts


class FrameReader:
    """Turns received bytes into messages: write into `get_buffer()`, then `feed` the count.

    `body` is memory of its own, aligned to `ALIGN`: it may be kept as long as needed.
    """

    def __init__(
        self, decoder: msgspec.msgpack.Decoder[Message], frame_bytes: int, header_bytes: int
    ) -> None:
        self._decode = decoder.decode
        self._frame_bytes = frame_bytes
        self._header_bytes = header_bytes
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        #: The frame larger than the chunk that is being received, if any.
        self._large: memoryview | None = None
        #: Bytes received of the large frame, or else in the chunk.
        self._have = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return (self._chunk if self._large is None else self._large)[self._have :]

    def feed(self, num_bytes: int) -> Iterator[tuple[Message, Body]]:
        """All frames complete with the next `num_bytes`. Raises `FrameError` at a bad one."""
        self._have += num_bytes
        if self._large is not None:
            if self._have == len(self._large):
                frame, self._large, self._have = self._large, None, 0
                yield self._split(frame, PREFIX.unpack_from(frame)[1], copy=False)
            return
        chunk, have, start = self._chunk, self._have, 0
        while have - start >= PREFIX.size:
            size, header_size = PREFIX.unpack_from(chunk, start)
            if not PREFIX.size < PREFIX.size + header_size <= size <= self._frame_bytes or (
                header_size > self._header_bytes
            ):
                raise self._refusal(size, header_size)
            if have - start < size:
                break
            yield self._split(chunk[start : start + size], header_size, copy=True)
            start += size
        left = chunk[start:have]
        if len(left) >= PREFIX.size and size > CHUNK_BYTES:
            # Untouched pages of np.empty cost nothing: a claim alone does not fill memory.
            self._large = np.empty(size, np.uint8).data
            self._large[: len(left)] = left
        elif start:
            chunk[: len(left)] = left
        self._have = len(left)

    def _refusal(self, size: int, header_size: int) -> FrameError:
        if not 0 < header_size <= self._header_bytes:
            return FrameError(f"header of {header_size} bytes, allowed: 1 to {self._header_bytes}")
        return FrameError(
            f"frame of {size} bytes with a header of {header_size}, "
            f"allowed: {PREFIX.size + header_size} to {self._frame_bytes}"
        )

    def _split(self, frame: memoryview, header_size: int, *, copy: bool) -> tuple[Message, Body]:
        end = PREFIX.size + header_size
        try:
            message = self._decode(frame[PREFIX.size : end])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FrameError(f"header is not a message: {error}") from None
        body = frame[end + -end % ALIGN :]
        return message, bytes(body) if copy else body
