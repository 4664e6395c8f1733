"""Calls of generated functions by `calling.c` and by ctypes: the same, and mistakes are errors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading

import numpy as np
import pytest
from needs import find_tool

from coissue.kernels.cpu.calls import address_of, call_by_ctypes, pack_places

SOURCE = """
#include <stdint.h>
#include <unistd.h>
extern "C" void add(const void* const* in, void* const* out, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i)
    ((float*)out[0])[i] = ((const float*)in[0])[i] + ((const float*)in[1])[i];
}
extern "C" void wait_for_a_byte(const void* const* in, void* const*, int64_t, int64_t) {
  char byte;
  while (read(*(const int*)in[0], &byte, 1) < 0) {}
}
"""


def find_callers():
    found = {"ctypes": call_by_ctypes}
    try:
        from coissue.kernels.cpu.calling import call
    except ImportError:
        return found
    return {**found, "compiled": call}


@pytest.fixture(params=find_callers().items(), ids=lambda param: param[0])
def call(request):
    return request.param[1]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    (folder / "f.cpp").write_text(SOURCE)
    command = [find_tool("cxx"), "-shared", "-fPIC", "-o", folder / "f.so", folder / "f.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "f.so"))


def test_places_first_and_last(call, library):
    x, y = np.arange(8, dtype="f4"), np.full(8, 10, "f4")
    made = np.zeros(8, "f4")
    addresses = [0, made.ctypes.data, y.ctypes.data, x.ctypes.data]
    call(address_of(library.add), pack_places([3, 2, 1]), 2, addresses, 2, 5)
    np.testing.assert_array_equal(made, [0, 0, 12, 13, 14, 0, 0, 0])


def test_other_threads_run_meanwhile(call, library):
    """The function returns only once another thread wrote, which needs the GIL."""
    ours, theirs = os.pipe()
    end = np.array([ours], "i4")
    given = (address_of(library.wait_for_a_byte), pack_places([0]), 1, [end.ctypes.data], 0, 1)
    thread = threading.Thread(target=call, args=given)
    thread.start()
    os.write(theirs, b".")
    thread.join(60)
    assert not thread.is_alive()
    for each in (ours, theirs):
        os.close(each)


def test_a_place_beyond_the_addresses(call, library):
    with pytest.raises(IndexError):
        call(address_of(library.add), pack_places([0, 1, 7]), 2, [1, 2, 3], 0, 0)


@pytest.mark.parametrize(
    "given",
    [(), (1, b"", 0, (), 0, 0), (1, [], 0, [], 0, 0), (0, b"", 0, [], 0, 0), (1, b"", 1, [], 0, 0),
     (1, bytes(4 * 257), 1, [0], 0, 0), (1, bytes(4), 1, ["x"], 0, 0), ("f", b"", 0, [], 0, 0)],
)  # fmt: skip
def test_mistakes_are_errors_and_nothing_is_called(tool, given):
    """Of the compiled one, which is there wherever a compiler is."""
    tool("cxx")
    with pytest.raises((TypeError, ValueError)):
        find_callers()["compiled"](*given)
