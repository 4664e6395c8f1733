"""Every scalar function over special values, the error bounds of the fast ones, 16-bit floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from stitch_reference import Builder, evaluate, simple_kernel
from stitch_run import run_cpp, run_emulated

from coissue.kernels.interpreter import NUMPY_DTYPES, round_bf16
from coissue.kernels.optable.pointwise import BINARY, UNARY
from coissue.kernels.stitch.graph import Graph

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 7.25, -7.25, 20.5, 88.0, 89.5, -88.0,
     -104.5, 1e-3, -1e-3, 1e-20, 1e-40, -1e-45, 1e10, -1e10, 3e38, -3e38, np.inf, -np.inf, np.nan],
    np.float32,
)  # fmt: skip
#: Relative error allowed; that of numpy's own erf in f64 is 2e-13.
NARROW = {"f16": 2e-3, "bf16": 1e-2, "f32": 4e-6, "f64": 3e-13}
#: Units in the last place, over all floats. Written down in `cpp.py`.
BOUNDS = {"exp": 2, "log": 2, "log1p": 2, "sigmoid": 3, "tanh": 3, "erf": 3}
#: 1 + erf(x) of a negative x is exact only beside 1; sigmoid(x) may be 0 where x times it is not.
CANCELS = {"gelu": 1e-6, "silu": 1e-43, "mish": 1e-43}
#: Where torch and numpy differ in what an infinity times zero is, nothing is promised.
ATTRS = ("leaky_relu", "elu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scalars")


def names_of(table, dtype: str) -> list[str]:
    kinds = ("any", "number") + (("float",) if dtype in NARROW else ())
    if dtype == "bool":
        kinds = ("any",)
    return [name for name, row in table.items() if row[0] in kinds and name not in ATTRS]


def compare(graph: Graph, values, folder, rtol: float) -> None:
    want = evaluate(graph, values, 1)
    kernel = simple_kernel(graph)
    for got in (
        run_cpp(graph, kernel, values, 1, folder),
        run_emulated(graph, kernel, values, 1, folder),
    ):
        for index, array in got.items():
            node = graph.nodes[index]
            with np.errstate(all="ignore"):
                expected = want[index].astype(NUMPY_DTYPES[node.dtype])
            expected = round_bf16(expected) if node.dtype == "bf16" else expected
            text = f"{node.name} of {node.dtype}"
            if expected.dtype.kind != "f":
                np.testing.assert_array_equal(array, expected, text)
                continue
            # Beside the relative error: one step among the denormals.
            step = {"f16": 6e-8, "f64": 5e-324}.get(node.dtype, 1.5e-45)
            step = CANCELS.get(node.name, step)
            np.testing.assert_allclose(array, expected, rtol=rtol, atol=2 * step, err_msg=text)


@pytest.mark.parametrize("dtype", NARROW)
def test_unary_functions_of_special_floats(folder, dtype):
    b = Builder()
    x = b.parameter(len(SPECIAL), dtype=dtype)
    graph = b.graph(*[b.call(name, x) for name in (*names_of(UNARY, dtype), "expm1")])
    with np.errstate(over="ignore"):
        values = {0: SPECIAL[None].astype(NUMPY_DTYPES[dtype])}
    values[0] = round_bf16(values[0]) if dtype == "bf16" else values[0]
    compare(graph, values, folder, NARROW[dtype])


@pytest.mark.parametrize("dtype", NARROW)
def test_binary_functions_of_special_floats(folder, dtype):
    b = Builder()
    count = len(SPECIAL)
    x, y = (b.parameter(count, count, dtype=dtype) for _ in range(2))
    kinds = names_of(BINARY, dtype)
    outputs = [b.call(n, x, y, dtype="bool" if BINARY[n][2] == "bool" else dtype) for n in kinds]
    chosen = b.call("where", b.call("lt", x, y, dtype="bool"), x, y, dtype=dtype)
    negated = b.call("logical_not", x, dtype="bool")
    clamped = b.call("clamp", x, b.constant(-1.5, dtype), b.constant(2.0, dtype))
    graph = b.graph(*outputs, chosen, negated, clamped)
    pairs = np.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    with np.errstate(over="ignore"):
        values = {i: pair[None].astype(NUMPY_DTYPES[dtype]) for i, pair in enumerate(pairs)}
    if dtype == "bf16":
        values = {i: round_bf16(pair) for i, pair in values.items()}
    compare(graph, values, folder, NARROW[dtype])


@pytest.mark.parametrize("dtype", ["u8", "i8", "i16", "i32", "i64", "bool"])
def test_functions_of_whole_numbers(folder, dtype):
    kind = NUMPY_DTYPES[dtype]
    if dtype == "bool":
        numbers = np.array([False, True])
    else:
        info = np.iinfo(kind)
        numbers = np.unique([info.min, info.min + 1, info.max, 0, 1, 2, 3, 7, max(info.min, -5)])
    b = Builder()
    count = len(numbers)
    x, y, divisor = (b.parameter(count, count, dtype=dtype) for _ in range(3))
    outputs = [b.call(name, x) for name in names_of(UNARY, dtype)]
    for name in names_of(BINARY, dtype):
        result = {"bool": "bool", "float": "f32"}.get(BINARY[name][2], dtype)
        by = divisor if name in ("div", "remainder", "floor_div") else y
        outputs.append(b.call(name, x, by, dtype=result))
    outputs.append(b.call("logical_not", x, dtype="bool"))
    outputs += [b.call("cast", x, dtype=other) for other in ("bool", "i64", "i8", "f32", "f64")]
    pairs = np.meshgrid(numbers, numbers, indexing="ij")
    values = {0: pairs[0][None].astype(kind), 1: pairs[1][None].astype(kind)}
    values[2] = np.where(values[1] == 0, 3, values[1]).astype(kind)
    compare(b.graph(*outputs), values, folder, 1e-6)


def test_division_by_a_whole_zero_does_not_stop_the_process(folder):
    b = Builder()
    x, zero = b.parameter(3, dtype="i32"), b.constant(0, "i32")
    graph = b.graph(b.call("floor_div", x, zero), b.call("remainder", x, zero))
    values = {0: np.array([[1, -7, -(2**31)]], np.int32)}
    for got in run_cpp(graph, simple_kernel(graph), values, 1, folder).values():
        assert not got.any()


def test_an_index_outside_reads_inside(folder):
    b = Builder()
    table, picks = b.parameter(4, 2, per_unit=False), b.parameter(6, dtype="i64")
    graph = b.graph(b.gather(table, picks, 0))
    values = {0: np.arange(8, dtype=np.float32).reshape(4, 2)}
    values[1] = np.array([[0, -1, -4, 99, -99, 2**62]], np.int64)
    compare(graph, values, folder, 0)


def as_steps(x: np.ndarray) -> np.ndarray:
    """Numbers whose difference is the number of floats between."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_stay_in_their_bounds(folder, name):
    # Every 1021st of all floats, both signs, and a dense part where results are large.
    bits = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32)
    dense = np.linspace(-12, 12, 500_000, dtype=np.float32)
    x = np.concatenate([bits.view(np.float32), dense])[None]
    b = Builder()
    graph = b.graph(b.call(name, b.parameter(x.shape[1])))
    (got,) = run_cpp(graph, simple_kernel(graph), {0: x}, 1, folder).values()
    want = evaluate(graph, {0: x}, 1)[1]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    fine = ~np.isnan(want)
    error = np.abs(as_steps(got[fine]) - as_steps(want[fine])).max()
    print(f"{name}: {error} units in the last place")
    assert error <= BOUNDS[name]


def test_one_plus_erf_is_near(folder):
    x = np.concatenate([np.linspace(-8, 8, 100_001), SPECIAL]).astype(np.float32)[None]
    b = Builder()
    erf = b.call("erf", b.parameter(x.shape[1]))
    graph = b.graph(b.call("add", erf, b.constant(1.0)))
    (got,) = run_cpp(graph, simple_kernel(graph), {0: x}, 1, folder).values()
    want = [[1 + math.erf(v) if v > 0 else math.erfc(-v) for v in x[0].astype(float)]]
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-7)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-8)


def test_halves_are_numpys_halves(folder):
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)[None]
    b = Builder()
    graph = b.graph(b.call("cast", b.parameter(every.shape[1], dtype="f16"), dtype="f32"))
    (got,) = run_cpp(graph, simple_kernel(graph), {0: every}, 1, folder).values()
    np.testing.assert_array_equal(got, every.astype(np.float32))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_floats_are_rounded_to_even(folder, dtype):
    bits = np.arange(0, 2**32, 509, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(0, 2**16, 7, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)[None]
    b = Builder()
    graph = b.graph(b.call("cast", b.parameter(x.shape[1]), dtype=dtype))
    (got,) = run_cpp(graph, simple_kernel(graph), {0: x}, 1, folder).values()
    with np.errstate(over="ignore"):
        want = round_bf16(x) if dtype == "bf16" else x.astype(np.float16)
    np.testing.assert_array_equal(got, want)
