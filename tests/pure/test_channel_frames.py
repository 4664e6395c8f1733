"""Frames of the channel: what is written is read again, in any pieces; hostile bytes end it."""

from __future__ import annotations

import resource

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coissue.deployments.channel.arena import take_tensors
from coissue.deployments.channel.checking import InferError
from coissue.deployments.channel.frames import (
    ALIGN,
    CHUNK_BYTES,
    FROM_CLIENT,
    FROM_SERVER,
    NUMPY_DTYPES,
    PREFIX,
    Ask,
    Cancel,
    Directory,
    FrameError,
    Goodbye,
    Hello,
    Infer,
    PortInfo,
    Result,
    TenantInfo,
    TensorRef,
)
from coissue.deployments.channel.framing import FrameReader, frame_buffers
from coissue.kernels.ir import DTYPE_BYTES, R, T, fixed

FRAME_LIMIT = 1 << 22
HEADER_LIMIT = 1 << 12


def make_reader(decoder=FROM_CLIENT) -> FrameReader:
    return FrameReader(decoder, FRAME_LIMIT, HEADER_LIMIT)


def feed(reader: FrameReader, data: bytes, piece: int):
    found = []
    while data:
        room = reader.get_buffer()
        size = min(piece, len(room), len(data))
        room[:size] = data[:size]
        data = data[size:]
        found += reader.feed(size)
    return found


def frame(message, arrays=()) -> bytes:
    return b"".join(frame_buffers(message, arrays))


def request(number: int, arrays: list[np.ndarray]) -> tuple[Infer, list[np.ndarray]]:
    names = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
    refs = tuple(TensorRef(names[array.dtype], array.shape) for array in arrays)
    return Infer(number, "tenant", 1, refs, (), 5_000_000, 2), arrays


@st.composite
def arrays(draw):
    dtype = NUMPY_DTYPES[draw(st.sampled_from(sorted(NUMPY_DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    seed = draw(st.integers(0, 2**32 - 1))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2, size, np.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def test_numpy_dtypes_cover_the_ir_one_to_one():
    assert {name: dtype.itemsize for name, dtype in NUMPY_DTYPES.items()} == DTYPE_BYTES
    assert len(set(NUMPY_DTYPES.values())) == len(NUMPY_DTYPES)


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
def test_every_message_survives_in_pieces(piece):
    info = TenantInfo(
        "a", 3, "ready", (PortInfo("x", "f32", (R, T, *fixed(8))),), rows_limit=4, tokens_limit=9
    )
    from_client = [Hello(1, "secret", 5, 4096), Cancel(7), Ask(8, "metrics"), Goodbye("enough")]
    from_server = [Directory((info, info)), Result(3, (TensorRef("f32", (2, 3), 64),), 1, 2, 3)]
    for decoder, messages in ((FROM_CLIENT, from_client), (FROM_SERVER, from_server)):
        data = b"".join(map(frame, messages))
        assert [message for message, _ in feed(make_reader(decoder), data, piece)] == messages


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(arrays(), max_size=4), max_size=4), st.integers(1, 300))
def test_tensors_survive_in_pieces(requests, piece):
    sent = [request(number, tensors) for number, tensors in enumerate(requests)]
    found = feed(make_reader(), b"".join(frame(*each) for each in sent), piece)
    assert [message for message, _ in found] == [message for message, _ in sent]
    for (message, body), (_, tensors) in zip(found, sent, strict=True):
        taken = take_tensors(message.inputs, body, None)
        assert len(taken) == len(tensors)
        for mine, theirs in zip(taken, tensors, strict=True):
            assert same_bits(mine, theirs)
            assert mine.flags.aligned


@pytest.mark.parametrize("extra", [-1, 0, 1, CHUNK_BYTES])
def test_frames_around_the_chunk_size(extra):
    """A frame larger than the receive buffer, with frames before and behind it."""
    big = np.arange(CHUNK_BYTES + extra - len(frame(Cancel(1))), dtype=np.uint8)
    sent = [request(1, [np.ones(3, np.float32)]), request(2, [big]), request(3, [])]
    for piece in (1000, CHUNK_BYTES, 1 << 30):
        found = feed(make_reader(), b"".join(frame(*each) for each in sent), piece)
        assert [message.id for message, _ in found] == [1, 2, 3]
        assert same_bits(take_tensors(found[1][0].inputs, found[1][1], None)[0], big)


def test_body_of_a_small_frame_outlives_the_receive_buffer():
    reader = make_reader()
    tensors = [np.arange(4.0), np.arange(4.0) + 10]
    (first,) = feed(reader, frame(*request(1, tensors[:1])), 1 << 30)
    feed(reader, frame(*request(2, tensors[1:])), 1 << 30)
    assert same_bits(take_tensors(first[0].inputs, first[1], None)[0], tensors[0])


@pytest.mark.parametrize(
    ("size", "header_size", "names"),
    [
        (FRAME_LIMIT + 1, 8, str(FRAME_LIMIT)),
        (2**32 - 1, 8, str(FRAME_LIMIT)),
        (1 << 30, 8, str(FRAME_LIMIT)),
        (100, 0, "header of 0"),
        (2**31, 2**31, "header of"),
        (HEADER_LIMIT + 100, HEADER_LIMIT + 1, str(HEADER_LIMIT)),
        (7, 8, "frame of 7"),
        (15, 8, "frame of 15"),
        (0, 1, "frame of 0"),
    ],
)
def test_lying_lengths_are_refused(size, header_size, names):
    with pytest.raises(FrameError, match=names):
        feed(make_reader(), PREFIX.pack(size, header_size) + bytes(64), 1 << 30)


def test_frames_before_a_bad_one_are_delivered():
    reader = make_reader()
    data = frame(Cancel(1)) + PREFIX.pack(3, 3)
    reader.get_buffer()[: len(data)] = data
    frames = reader.feed(len(data))
    assert next(frames)[0] == Cancel(1)
    with pytest.raises(FrameError):
        next(frames)


def test_a_claimed_size_alone_fills_no_memory():
    readers = [FrameReader(FROM_CLIENT, 1 << 30, HEADER_LIMIT) for _ in range(8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for reader in readers:
        feed(reader, PREFIX.pack(1 << 30, 8) + bytes(8), 1 << 30)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1 << 20, "eight claims of 1 GiB may not cost a gigabyte"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_headers_are_messages_or_refused(header):
    data = PREFIX.pack(PREFIX.size + len(header), len(header)) + header
    try:
        found = feed(make_reader(), data, 1 << 30)
    except FrameError:
        return
    assert all(type(message) in (Hello, Infer, Cancel, Ask, Goodbye) for message, _ in found)


def test_a_message_of_the_other_side_is_refused():
    with pytest.raises(FrameError, match="not a message"):
        feed(make_reader(FROM_CLIENT), frame(Directory(())), 1 << 30)


def test_bodies_that_do_not_fit_their_tensors_are_malformed():
    message, _ = request(1, [np.zeros(4, np.float32)])
    for size in (0, 15, 17, 64):
        with pytest.raises(InferError, match=f"body of {size} bytes") as error:
            take_tensors(message.inputs, bytes(size), None)
        assert error.value.reason == "malformed"
    assert len(take_tensors(message.inputs, bytes(16), None)) == 1


def test_tensors_start_aligned_in_the_frame():
    message, tensors = request(1, [np.ones(3, np.uint8), np.full(2, 7.0)])
    data = frame(message, tensors)
    at = data.index(np.full(2, 7.0).tobytes())
    assert at % ALIGN == 0


def test_a_reason_that_no_text_can_hold_does_not_keep_the_directory_from_being_sent():
    """What Python makes of a file name that is not UTF-8, in the message of a tenant's error."""
    reason = "no weights at /models/gew\udce4hlt.pt"
    told = TenantInfo("bad", 1, "failed", reason=reason)
    for info in (told, msgspec.structs.replace(TenantInfo("bad", 1, "loading"), reason=reason)):
        assert info.reason == "no weights at /models/gew\\udce4hlt.pt"
        message = Directory((TenantInfo("good", 1, "ready"), info))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Directory) == message
