"""The spec takes every legal case and says in one sentence what is wrong with the others."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import op_cases
import pytest
from op_cases import shaped

from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import Dim, Op, Port, Program, Type, Weight, decode_program, encode_program
from coissue.kernels.optable.table import OPAQUE_TARGETS, OPS
from coissue.kernels.spec import DEFAULT, SpecError, bind_sizes, check_program

DIGEST = "ab" * 32


def mlp(**changes) -> Program:
    """x (R, T, 4) -> linear -> gelu."""
    program = Program(
        name="mlp",
        types=(shaped("f32", "R", "T", 4), shaped("f32", 3, 4), shaped("f32", "R", "T", 3),
               shaped("f32", "R", "T", 3)),
        inputs=(Port("x", 0),),
        weights=(Weight("w", 1, DIGEST),),
        ops=(
            Op("linear", (0, 1), (2,), {"layout": "nk"}, "net.0"),
            Op("gelu", (2,), (3,), {"approximate": "none"}, "net.1"),
        ),
        outputs=(Port("y", 3),),
        rows_limit=8,
        tokens_limit=16,
    )  # fmt: skip
    return msgspec.structs.replace(program, **changes)


def with_op(index: int, **changes) -> Program:
    ops = list(mlp().ops)
    ops[index] = msgspec.structs.replace(ops[index], **changes)
    return mlp(ops=tuple(ops))


def with_type(value: int, type_: Type) -> Program:
    types = list(mlp().types)
    types[value] = type_
    return mlp(types=tuple(types))


@pytest.mark.parametrize("case", op_cases.CASES, ids=lambda case: case.label)
def test_case_is_legal_and_survives_its_stored_form(case):
    program = decode_program(encode_program(case.program()))
    assert program == case.program()
    check_program(program)


ILLEGAL = {
    "version": (mlp(version=2), "version 2; this build reads 1"),
    "unknown op": (with_op(0, name="evil"), "op 0 'evil' at 'net.0': is not in the op table"),
    "attr missing": (with_op(0, attrs={}), "attr layout is 'None'; allowed: 'nk' or 'kn'"),
    "attr unknown": (with_op(1, attrs={"approximate": "none", "x": 1}), "has an attr 'x'"),
    "attr kind": (with_op(1, attrs={"approximate": 3}), "attr approximate is '3'"),
    "too few inputs": (with_op(0, inputs=(0,)), "has 1 inputs; allowed: 2 to 3"),
    "absent": (with_op(0, inputs=(0, -1)), "input 1 is value -1, which is not defined before"),
    "later value": (with_op(0, inputs=(0, 3)), "input 1 is value 3, which is not defined before"),
    "no such value": (with_op(0, inputs=(0, 99)), "input 1 is value 99"),
    "defined twice": (with_op(1, outputs=(2,)), "output 0 is value 2, which is already defined"),
    "output id": (with_op(1, outputs=(7,)), "output 0 is value 7; allowed: 0 to 3"),
    "outputs": (with_op(1, outputs=()), "has 0 outputs; allowed: 1"),
    "never defined": (mlp(ops=mlp().ops[:1]), "value 3 is declared but never defined"),
    "program output": (mlp(outputs=(Port("y", 44),)), "output 'y' is 44; allowed: 0 to 3"),
    "names": (mlp(outputs=(Port("y", 3), Port("y", 2))), "two of the outputs are named 'y'"),
    "control": (with_op(0, where="a\nb"), "has characters that cannot be printed"),
    "no inputs": (mlp(inputs=()), "the number of inputs is 0; allowed: 1 to 64"),
    "digest": (mlp(weights=(Weight("w", 1, "12"),)), "digest that is not 64 hex digits"),
    "dynamic weight": (
        mlp(inputs=(Port("x", 1),), weights=(Weight("w", 0, DIGEST),)),
        "weight 'w' is f32[R, T, 4]; allowed: no R, no T",
    ),
    "shape": (with_type(2, shaped("f32", "R", "T", 5)),
              "value 2 is declared f32[R, T, 5], but is f32[R, T, 3]"),
    "dtype": (with_type(3, shaped("f16", "R", "T", 3)), "is declared f16[R, T, 3], but is f32"),
    "dtype name": (with_type(3, shaped("f8", "R")), "value 3 has dtype 'f8'; allowed: bool"),
    "weight shape": (with_type(1, shaped("f32", 3, 5)), "needs [5]"),
    "extent 0": (with_type(0, shaped("f32", 0)), "an extent of value 0 is 0; allowed: 1"),
    "power": (with_type(0, Type((Dim(1, 99),), "f32")), "the power of R in value 0 is 99"),
    "negative power": (with_type(0, Type((Dim(1, -1),), "f32")), "the power of R in value 0 is -1"),
    "rank": (with_type(0, shaped("f32", *[1] * 9)), "the rank of value 0 is 9; allowed: 0 to 8"),
    "bytes": (with_type(0, shaped("f32", 2**20, 2**20)), "the bytes of value 0 at rows_limit is"),
    "rows": (mlp(rows_limit=0), "rows_limit is 0; allowed: 1 to"),
    "no tokens": (mlp(tokens_limit=0), "the power of T in value 0 is 1; allowed: 0 to 0"),
    "untold": (
        mlp(types=(shaped("f32", "2*R*T"), shaped("f32", "R", "T", 2)), weights=(),
            ops=(Op("reshape", (0,), (1,)),), outputs=(Port("y", 1),)),
        "no input has an extent that is a multiple of R alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_program_is_refused_with_the_reason(name):
    program, sentence = ILLEGAL[name]
    check_program(mlp())
    with pytest.raises(SpecError) as caught:
        check_program(program)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def one_op(op: str, *types: Type, out: Type, **attrs) -> Program:
    count = len(types)
    return Program(
        name=op,
        types=(*types, out, shaped("bool", "R", "T")),
        inputs=(*(Port(f"x{i}", i) for i in range(count)), Port("sizes", count + 1)),
        weights=(),
        ops=(Op(op, tuple(range(count)), (count,), attrs, "net"),),
        outputs=(Port("y", count),),
        rows_limit=8,
        tokens_limit=16,
    )


X = shaped("f32", "R", "T", 4)
MISFITS = [
    (one_op("add", X, shaped("f32", "R", 5), out=X), "do not broadcast"),
    (one_op("add", X, shaped("i64", 4), out=X), "inputs have dtypes f32, i64"),
    (one_op("exp", shaped("i64", "R"), out=shaped("i64", "R")), "dtypes i64; allowed: one of f16"),
    (one_op("reshape", X, out=shaped("f32", "R", 4)), "the number of elements differs"),
    (one_op("expand", X, out=shaped("f32", "R", "R", 4)), "do not broadcast"),
    (one_op("permute", X, out=X, dims=(0, 1, 1)), "are not a permutation"),
    (one_op("concat", X, shaped("f32", "R", 1, 4), out=X, dim=1), "T + 1 is not a product"),
    (one_op("slice", shaped("f32", 12), out=shaped("f32", "T"), dim=0, start=0, step=1),
     "T elements from 0 by 1 are not inside 12"),
    (one_op("slice", X, out=shaped("f32", "R", 2, 4), dim=1, start=0, stop=2, step=1),
     "0:2 of T is not inside it for every R and T"),
    (one_op("slice", X, out=shaped("f32", "R", "T", 1), dim=2, start=3, stop=2, step=1), "empty"),
    (one_op("select", X, out=shaped("f32", "R", 4), dim=1, index=1), "index 1 is outside T"),
    (one_op("select", X, out=X, dim=3, index=0), "dim 3 is not one of the 3 dims"),
    (one_op("sum", X, out=X, dims=(1, 1), keepdim=True), "must be increasing dims"),
    (one_op("pad", X, out=X, pads=(0, 0, 1, 1), value=0.0), "cannot be padded"),
    (one_op("pad", shaped("i8", 3), out=shaped("i8", 5), pads=(1, 1), value=300), "300 is not"),
    (one_op("clamp", shaped("u8", 3), out=shaped("u8", 3), min=-1), "min -1 is not a value of u8"),
    (one_op("clamp", X, out=X), "a clamp needs min, max or both"),
    (one_op("slice", shaped("f32", 9), out=shaped("f32", 1), dim=0, start=0, stop=9, step=2**62),
     "attr step is '4611686018427387904'; allowed: int from 1 to"),
    (one_op("max_pool", shaped("f32", "R", 2, "T"), out=X, kernel=(3,), stride=(2,), padding=(0,),
            dilation=(1,), ceil=False), "does not give a product of R, T and a number"),
    (one_op("max_pool", shaped("f32", "R", 2, 9), out=X, kernel=(3,), stride=(2,), padding=(2,),
            dilation=(1,), ceil=False), "padding 2 is over half of the window 3"),
    (one_op("max_pool", shaped("f32", "R", 2, 9), out=X, kernel=(3, 3), stride=(2,), padding=(2,),
            dilation=(1,), ceil=False), "one entry per spatial dim"),
    (one_op("conv", shaped("f32", "R", 4, 9), shaped("f32", 6, 3, 3), out=X, stride=(1,),
            padding=(1,), dilation=(1,), groups=1), "in 1 groups does not fit"),
    (one_op("conv", shaped("f32", "R", 4, 2), shaped("f32", 6, 4, 3), out=X, stride=(1,),
            padding=(0,), dilation=(1,), groups=1), "does not fit 2"),
    (one_op("arange", out=shaped("i64", "T"), start=2**62, step=2**60), "leaves the range of i64"),
    (one_op("constant", out=shaped("i8"), value=128), "value 128 is not a value of i8"),
    (one_op("full", out=shaped("f32", "R"), value=True), "value True is not a value of f32"),
    (one_op("index", X, shaped("i64", 2), shaped("i64", 2), out=X, dims=(0, 2)), "be adjacent"),
    (one_op("index", X, shaped("f32", 2), out=X, dims=(0,)), "inputs have dtypes f32"),
    (one_op("embedding", shaped("f32", 5), shaped("i64", "R"), out=X), "[5]; needs rank 2"),
    (one_op("lstm", X, shaped("f32", 4, 4), out=X, hidden=1, layers=1, bidirectional=False,
            bias=False), "has 1 outputs; allowed: 3"),
    (one_op("opaque", X, out=X, target="aten.system.default", args="[[],{}]"), "not on the list"),
    (one_op("opaque", X, out=X, target="aten.tan.default", args="{}"), "is not JSON of the form"),
    (one_op("opaque", X, out=X, target="aten.tan.default", args="[" * 4000), "is not JSON"),
    (one_op("opaque", X, out=X, target="aten.tan.default", args='[[{"input": 1}], {}]'),
     "args names input 1 of 1"),
    (one_op("opaque", X, out=X, target="aten.tan.default", args='[[{"device": "x"}], {}]'),
     "which no argument may be"),
    (one_op("opaque", X, out=X, target="aten.tan.default", args='[[{"dtype": "f8"}], {}]'),
     "which no argument may be"),
    (one_op("opaque", shaped("f32", 999, 1), shaped("f32", 1, 999), out=shaped("f32", 1),
            target="aten.atan2.default", args='[[{"input": 0}, {"input": 1}], {}]'),
     "the output has shape [1]; needs [999, 999]"),
    (one_op("opaque", shaped("f32", "R", 3, 4, 4), out=shaped("f32", "R", 3, 8, 8),
            target="aten.upsample_nearest2d.vec", args='[[{"input": 0}, [9999, 9999], null], {}]'),
     "needs [R, 3, 9999, 9999]"),
    (one_op("opaque", shaped("f32", "R", 3, 4, 4), out=shaped("f32", "R", 3, 8, 8),
            target="aten.upsample_nearest2d.vec", args='[[{"input": 0}, null, [1e9, NaN]], {}]'),
     "needs input 0 and a size or factors"),
    (one_op("opaque", shaped("f32", 1, 1, 1, 1), shaped("f32", 999, 9, 9, 9),
            out=shaped("f32", 1, 1, 800, 800), target="aten.upsample_nearest2d.vec",
            args='[[{"input": 1}, [800, 800], null], {}]'), "needs input 0 and a size or factors"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "sentence"), MISFITS, ids=[s[:40] for _, s in MISFITS])
def test_op_that_does_not_fit_is_refused_with_the_reason(program, sentence):
    with pytest.raises(SpecError, match=r"^op 0 .* at 'net': ") as caught:
        check_program(program)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("rest", ["[8, 12], null", "null, [2.0, 3.0]", "[8, 12], false, null"])
def test_upsampling_of_the_declared_size_is_legal(rest):
    args = f'[[{{"input": 0}}, {rest}], {{}}]'
    image, out = shaped("f32", "R", 3, 4, 4), shaped("f32", "R", 3, 8, 12)
    check_program(one_op("opaque", image, out=out, target="aten.upsample_nearest2d.vec", args=args))


def test_limits_are_limits():
    for name, value in (("ops", 1), ("values", 3), ("rank", 2), ("rows", 7), ("tokens", 15),
                        ("value_bytes", 100), ("weight_bytes", 47), ("text", 4)):  # fmt: skip
        with pytest.raises(SpecError, match="allowed"):
            check_program(mlp(), dataclasses.replace(DEFAULT, **{name: value}))
    check_program(mlp(), dataclasses.replace(DEFAULT, ops=2, values=4, weight_bytes=48))


def test_ops_on_weights_alone_are_counted_where_they_are_repeated():
    """Each linear needs the whole chain: 3 and 3 ops are 9 in kernels."""
    square, rows = shaped("f32", 4, 4), shaped("f32", "R", 4)
    chain = [Op("neg", (i,), (i + 1,), {}, "w") for i in range(1, 4)]
    linears = [
        Op("linear", (0 if i == 5 else i - 1, 4), (i,), {"layout": "nk"}, "x") for i in range(5, 8)
    ]
    program = mlp(types=(rows, *[square] * 4, *[rows] * 3), ops=(*chain, *linears),
                  outputs=(Port("y", 7),))  # fmt: skip
    check_program(program, dataclasses.replace(DEFAULT, repeats=9))
    with pytest.raises(SpecError, match="repeated where needed, is 9; allowed: 0 to 8"):
        check_program(program, dataclasses.replace(DEFAULT, repeats=8))


def test_equal_weights_count_once_and_must_have_one_type():
    types = (shaped("f32", "R", 4), shaped("f32", 4), shaped("f32", 4), shaped("f32", "R", 4))
    program = Program(
        name="tied", types=types, inputs=(Port("x", 0),),
        weights=(Weight("a", 1, DIGEST), Weight("b", 2, DIGEST)),
        ops=(Op("add", (0, 1), (3,)),), outputs=(Port("y", 3),), rows_limit=2,
    )  # fmt: skip
    check_program(program, dataclasses.replace(DEFAULT, weight_bytes=16))
    other = (*types[:2], shaped("f32", 2, 2), types[3])
    with pytest.raises(SpecError, match="another type than one of equal digest"):
        check_program(msgspec.structs.replace(program, types=other))


def test_sizes_follow_from_shapes():
    types = [shaped("f32", "R", "T", 4), shaped("i64", "2*R"), shaped("f32", 3)]
    assert bind_sizes(types, [(2, 5, 4), (4,), (3,)]) == (2, 5)
    assert bind_sizes(types[2:], [(3,)]) == (1, 0)
    first = [(2, 5, 3), (0, 5, 4), (2, 5), (2, 0, 4), (2, 5, 4, 1), (3, 5, 4), (2, -5, 4)]
    for shapes in ([(2, 5, 4), (5,), (3,)], *([shape, (4,), (3,)] for shape in first)):
        with pytest.raises(SpecError, match="an input has shape"):
            bind_sizes(types, shapes)


def test_rows_of_one_request_do_not_depend_on_each_other():
    program = mlp()
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((3, 5, 4), np.float32), rng.standard_normal((3, 4), np.float32)
    whole = interpret(program, {"x": x}, {DIGEST: w})["y"]
    for row in range(3):
        alone = interpret(program, {"x": x[row : row + 1]}, {DIGEST: w})["y"]
        np.testing.assert_array_equal(alone[0], whole[row])


def test_names_in_the_table_are_plain():
    assert all(name.isidentifier() and name.islower() for name in OPS)
    assert all(target.startswith("aten.") for target in OPAQUE_TARGETS)
