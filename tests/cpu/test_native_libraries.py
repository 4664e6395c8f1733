"""Libraries of generated code on disk: by content, whole or not there, shared by processes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import native_rig
import pytest

from coissue.kernels.cpu import native

SOURCE = 'extern "C" int answer() { return 42; }\n'
#: Compiles `SOURCE` into a folder once a line on its input lets it go.
RACER = """
import sys
from pathlib import Path
from coissue.kernels.cpu import native
chain = native.find_toolchain()
print("ready", flush=True)
sys.stdin.readline()
print(native.compile_source(Path(sys.argv[1]), chain, sys.argv[2]))
"""


@pytest.fixture(scope="module")
def chain():
    found = native_rig.find_chain()
    return found


def call(folder: Path, file: str) -> int:
    return ctypes.CDLL(str(folder / file)).answer()


def forbid_compiler(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the compiler was started")

    monkeypatch.setattr(native.subprocess, "run", fail)


def test_a_library_is_made_once(chain, tmp_path, monkeypatch):
    file = native.compile_source(tmp_path, chain, SOURCE)
    assert call(tmp_path, file) == 42
    forbid_compiler(monkeypatch)
    assert native.compile_source(tmp_path, chain, SOURCE) == file


def test_source_compiler_and_flags_are_in_the_name(chain):
    other = native.Toolchain(chain.compiler, chain.description + "-mno-fma")
    names = {chain.name_of(SOURCE), chain.name_of(SOURCE + " "), other.name_of(SOURCE)}
    assert len(names) == 3
    assert all(flag in chain.description for flag in native.FLAGS)


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", b"x" * 20_000])
def test_a_damaged_library_is_made_again(chain, tmp_path, damage):
    file = native.compile_source(tmp_path, chain, SOURCE)
    (tmp_path / file).write_bytes(damage)
    assert native.find_library(tmp_path, chain.name_of(SOURCE)) is None
    again = native.compile_source(tmp_path, chain, SOURCE)
    assert native.is_intact(tmp_path / again)
    assert call(tmp_path, again) == 42


def test_a_library_of_another_content_is_not_taken(chain, tmp_path):
    """A whole library under the name of another source is no more than a damaged one."""
    file = native.compile_source(tmp_path, chain, SOURCE)
    other = native.compile_source(tmp_path, chain, SOURCE.replace("42", "41"))
    (tmp_path / file).write_bytes((tmp_path / other).read_bytes())
    assert call(tmp_path, native.compile_source(tmp_path, chain, SOURCE)) == 42


def test_two_processes_may_make_one_library(chain, tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), SOURCE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    files = {racer.communicate()[0].strip() for racer in racers}
    assert all(racer.returncode == 0 for racer in racers)
    assert [call(tmp_path, file) for file in files] == [42] * len(files)
    assert native.find_library(tmp_path, chain.name_of(SOURCE)) in files


def test_two_processes_of_one_pid_do_not_share_a_folder(chain, tmp_path, monkeypatch):
    """As in two containers with one cache: each compiles under a name of its own."""
    monkeypatch.setattr(native.os, "getpid", lambda: 7)
    folders, run = [], native.subprocess.run

    def note(command, **how):
        folders.append(Path(command[-1]).parent)
        assert len(list(tmp_path.glob("partial-*"))) == 1
        return run(command, **how)

    monkeypatch.setattr(native.subprocess, "run", note)
    for source in (SOURCE, SOURCE.replace("42", "41")):
        native.compile_source(tmp_path, chain, source)
    assert len(set(folders)) == 2
    assert not list(tmp_path.glob("partial-*"))


def test_what_the_compiler_says_is_the_reason(chain, tmp_path):
    with pytest.raises(native.NativeError, match=r"error: .*nonsense"):
        native.compile_source(tmp_path, chain, "nonsense;")
    assert not list(tmp_path.glob("*.so"))


def test_a_compiler_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(native, "SOURCE_SECONDS", 0.05)
    with pytest.raises(native.NativeError, match="took over"):
        native.compile_source(tmp_path, native.Toolchain(str(slow), "slow"), SOURCE)


def test_a_build_is_read_as_it_was_written_or_not_at_all(tmp_path):
    call_ = native.Call("a.so", "run", (0, 2), (3, -1))
    build = native.Build((native.Run((0, 1), (call_,), (native.Scratch("f32", 8),), ((1, 5),)),))
    path = tmp_path / "build.json"
    native.write_build(path, build)
    assert native.read_build(path) == build
    content = path.read_bytes()
    for damaged in (content[:-1], content.replace(b"[0,1]", b"[0,2]"), b"", b"\xff\n{}"):
        path.write_bytes(damaged)
        assert native.read_build(path) is None
    assert native.read_build(tmp_path / "none.json") is None
