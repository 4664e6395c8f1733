"""Whatever a hostile program says, the spec answers with nothing or with a `SpecError`."""

from __future__ import annotations

import copy
import random

import msgspec
import op_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from coissue.kernels.interpreter import InterpretError, interpret
from coissue.kernels.ir import Program, decode_program, encode_program
from coissue.kernels.optable.table import OPS
from coissue.kernels.spec import SpecError, check_program

ATTRS = sorted({name for definition in OPS.values() for name in definition.attrs})
ODD = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 2**31, 2**63 - 1, True, False, 0.5, -1e308, "nk",
       "", "bhsd", None, [], [0], [1, 1], [0, 1, 2], [2**62], "f32", "bool", "[[],{}]"]  # fmt: skip


def plain(program: Program):
    """The program as nested lists and dicts, the way it travels."""
    return msgspec.msgpack.decode(encode_program(program))


def refusal(program: Program) -> str:
    """What the spec has against the program; empty if nothing."""
    try:
        check_program(program)
    except SpecError as error:
        return str(error)
    return ""


def places(node, path=()):
    """Every path into nested lists and dicts."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in items if isinstance(node, dict | list) else ():
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))
        else:
            yield (*path, key)


def mutate(tree, rng: random.Random) -> None:
    """Replaces, drops, doubles or swaps one place, or adds an attr."""
    path = rng.choice([p for p in places(tree) if p])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, choice = path[-1], rng.random()
    if choice < 0.6:
        parent[key] = copy.deepcopy(rng.choice(ODD))
    elif choice < 0.7 and isinstance(parent, list):
        del parent[key]
    elif choice < 0.8 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif choice < 0.9 and isinstance(parent, list):
        other = rng.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif isinstance(tree.get("ops"), list):
        for op in (op for op in tree["ops"] if isinstance(op, dict)):
            op["name"] = rng.choice(list(OPS))
            op["attrs"] = {name: copy.deepcopy(rng.choice(ODD)) for name in rng.sample(ATTRS, 4)}


@given(case=st.sampled_from(op_cases.CASES), seed=st.integers(0, 2**32), count=st.integers(1, 4))
@settings(max_examples=800, deadline=None)
def test_only_a_spec_error_escapes(case, seed, count):
    rng, tree = random.Random(seed), plain(case.program())
    for _ in range(count):
        if isinstance(tree, dict):
            mutate(tree, rng)
    try:
        program = decode_program(msgspec.msgpack.encode(tree))
    except msgspec.ValidationError:
        return
    text = refusal(program)
    assert "\n" not in text
    assert len(text) < 2000


@given(case=st.sampled_from(op_cases.CASES), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_what_the_spec_takes_has_the_declared_meaning(case, seed):
    """A mutant that passes runs and gives what its types declare, or says why it has no result."""
    rng, tree = random.Random(seed), plain(case.program())
    op = tree["ops"][0]
    for name in op["attrs"]:
        if rng.random() < 0.5:
            op["attrs"][name] = copy.deepcopy(rng.choice(ODD))
    try:
        program = decode_program(msgspec.msgpack.encode(tree))
        check_program(program)
    except (msgspec.ValidationError, SpecError):
        return
    rows, tokens = rng.choice(op_cases.SIZES)
    try:
        found = interpret(program, *case.feed(case.arrays(rows, tokens), rows, tokens))
    except InterpretError as error:
        sentence = str(error)
    else:
        shapes = {port.name: program.types[port.value].at(rows, tokens) for port in program.outputs}
        assert {name: array.shape for name, array in found.items()} == shapes
        return
    assert "gave the shape" not in sentence
