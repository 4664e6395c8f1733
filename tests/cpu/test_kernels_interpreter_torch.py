"""The interpreter says what torch eager says, for every op at odd, single and one-row sizes."""

from __future__ import annotations

import warnings

import numpy as np
import op_cases
import pytest
import torch
import torch.nn.functional as F

from coissue.kernels.interpreter import NUMPY_DTYPES, InterpretError, interpret
from coissue.kernels.ir import Op, Program
from coissue.kernels.optable.table import OPS
from coissue.kernels.spec import check_program

torch.set_num_threads(1)
TORCH_DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32,
    "f64": torch.float64,
}  # fmt: skip


def _clamp(x, min=None, max=None):
    return torch.clamp(x.double() if x.is_floating_point() else x, min, max).to(x.dtype)


def _avg_pool(x, kernel, stride, padding, ceil, include_pad, divisor=None):
    pool = F.avg_pool1d if len(kernel) == 1 else F.avg_pool2d
    extra = {} if divisor is None else {"divisor_override": divisor}
    return pool(x, kernel, stride, padding, ceil, include_pad, **extra)


def _max_pool(x, kernel, stride, padding, dilation, ceil):
    if len(kernel) == 1 and not x.is_floating_point():  # torch has no such pool
        return _max_pool(x.double(), kernel, stride, padding, dilation, ceil).to(x.dtype)
    pool = F.max_pool1d if len(kernel) == 1 else F.max_pool2d
    return pool(x, kernel, stride, padding, dilation, ceil)


def _attention(q, k, v, seen=None, /, *, causal, scale, layout, mask):
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if mask == "key":
        seen = seen[:, None, None, :]
        if causal:
            seen = seen & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            causal = False
    y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, scale=scale)
    return y.transpose(1, 2) if layout == "bshd" else y


def _recurrent(module):
    def run(x, *weights, hidden, layers, bidirectional, bias, **more):
        more |= {"bias": bias, "batch_first": True, "bidirectional": bidirectional}
        net = module(x.shape[2], hidden, layers, **more)
        for parameter, weight in zip(net.parameters(), weights, strict=True):
            parameter.data = weight
        with torch.no_grad():
            y, state = net(x)
        return (y, *state) if isinstance(state, tuple) else (y, state)

    return run


def _bag(table, idx, mode):
    flat = F.embedding_bag(idx.reshape(-1, idx.shape[-1]), table, mode=mode)
    return flat.reshape(*idx.shape[:-1], table.shape[1])


def _slice(x, dim, start, step, stop=None, out=None):
    if stop is None:
        first = start + x.shape[dim] if start < 0 else start
        return x[(slice(None),) * dim + (slice(first, None, step),)].narrow(dim, 0, out[0][dim])
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _conv(x, w, b=None, **attrs):
    return (F.conv1d if w.dim() == 3 else F.conv2d)(x, w, b, **attrs)


def _adaptive(x, size):
    return (F.adaptive_avg_pool1d if len(size) == 1 else F.adaptive_avg_pool2d)(x, size)


def _reduce(fn):
    return lambda x, dims, keepdim: fn(x, dims, keepdim)


def _prod(x, dims, keepdim):
    for d in reversed(dims):
        x = torch.prod(x, d, keepdim)
    return x


#: What torch eager does for an op, where it is not `torch.<name>` on the inputs.
TORCH = {
    "identity": lambda x: x,
    "relu": F.relu, "silu": F.silu, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
    "mish": F.mish, "softplus": F.softplus, "gelu": F.gelu,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "elu": F.elu, "clamp": _clamp,
    "cast": lambda x, out: x.to(out[1]),
    "floor_div": torch.floor_divide,
    "constant": lambda value, out: torch.from_numpy(np.array(value)).to(out[1]),
    "full": lambda value, out: torch.from_numpy(np.array(value)).to(out[1]).expand(out[0]),
    "arange": lambda start, step, out: torch.arange(out[0][0]) * step + start,
    "sum": _reduce(torch.sum), "mean": _reduce(torch.mean), "amax": _reduce(torch.amax),
    "amin": _reduce(torch.amin),
    # torch gives u8 for u8.
    "any": lambda x, dims, keepdim: torch.any(x, dims, keepdim).bool(),
    "all": lambda x, dims, keepdim: torch.all(x, dims, keepdim).bool(),
    "prod": _prod,
    "var": lambda x, dims, keepdim, correction: torch.var(
        x, dims, keepdim=keepdim, correction=correction
    ),
    "layer_norm": lambda x, w=None, b=None, *, axes, eps: F.layer_norm(
        x, x.shape[-axes:], w, b, eps
    ),
    "rms_norm": lambda x, w=None, *, axes, eps: F.rms_norm(x, x.shape[-axes:], w, eps),
    "batch_norm": lambda x, m, v, w=None, b=None, *, eps: F.batch_norm(x, m, v, w, b, eps=eps),
    "group_norm": lambda x, w=None, b=None, *, groups, eps: torch.group_norm(x, groups, w, b, eps),
    "linear": lambda x, w, b=None, *, layout: F.linear(x, w if layout == "nk" else w.T, b),
    "conv": _conv, "max_pool": _max_pool, "avg_pool": _avg_pool, "adaptive_avg_pool": _adaptive,
    "attention": _attention,
    "reshape": lambda x, out: x.reshape(out[0]),
    "expand": lambda x, out: x.expand(out[0]),
    "slice": _slice,
    "select": torch.select, "flip": torch.flip,
    "concat": lambda *xs, dim: torch.cat(xs, dim),
    "pad": lambda x, pads, value: torch.constant_pad_nd(
        x, pads, torch.from_numpy(np.array(value)).to(x.dtype).item()
    ),
    "index": lambda x, *idx, dims: x[(slice(None),) * dims[0] + tuple(i.long() for i in idx)],
    "gather": lambda x, idx, dim: torch.gather(x, dim, idx),
    "embedding": lambda table, idx: F.embedding(idx, table),
    "embedding_bag": _bag,
    "lstm": _recurrent(torch.nn.LSTM), "gru": _recurrent(torch.nn.GRU),
    "rnn": _recurrent(torch.nn.RNN),
}  # fmt: skip


def to_torch(array, dtype):
    return torch.from_numpy(np.array(array)).to(TORCH_DTYPES[dtype])


def run_torch(case, arrays, rows, tokens):
    tensors = [
        None if arg is None else to_torch(array, arg.type.dtype)
        for arg, array in zip(case.args, arrays, strict=True)
    ]
    return apply_torch(case, tensors, rows, tokens)


def apply_torch(case, tensors, rows, tokens):
    attrs = dict(case.attrs)
    if OPS[case.op].typed and case.op not in ("conv", "max_pool", "avg_pool"):
        attrs["out"] = (case.outputs[0].at(rows, tokens), TORCH_DTYPES[case.outputs[0].dtype])
    found = TORCH.get(case.op, getattr(torch, case.op, None))(*tensors, **attrs)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("case", op_cases.CASES, ids=lambda case: case.label)
def test_interpreter_equals_torch(case):
    program = case.program()
    check_program(program)
    for rows, tokens in case.sizes:
        arrays = case.arrays(rows, tokens)
        found = interpret(program, *case.feed(arrays, rows, tokens))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of var over too few elements
            wanted = run_torch(case, arrays, rows, tokens)
        for i, (type_, tensor) in enumerate(zip(case.outputs, wanted, strict=True)):
            assert tensor.dtype == TORCH_DTYPES[type_.dtype]
            array = tensor.float().numpy() if type_.dtype == "bf16" else tensor.numpy()
            got = found[f"y{i}"]
            assert got.dtype == NUMPY_DTYPES[type_.dtype]
            np.testing.assert_allclose(
                got, array, rtol=case.tolerance, atol=case.tolerance, err_msg=f"{rows=} {tokens=}"
            )


def test_every_op_has_a_case():
    assert {case.op for case in op_cases.CASES} == set(OPS) - {"opaque"}


def test_fully_masked_row_is_zero_in_torch_too():
    q = torch.randn(1, 1, 2, 4)
    hidden = torch.tensor([[False, False], [True, False]])
    assert (F.scaled_dot_product_attention(q, q, q, hidden)[0, 0, 0] == 0).all()


@pytest.mark.parametrize("op", ["remainder", "floor_div"])
def test_integer_division_by_zero_is_an_error_in_both(op):
    case = next(c for c in op_cases.CASES if c.op == op and c.args[0].type.dtype == "i64")
    arrays = case.arrays(1, 1)
    arrays[1][:] = 0
    with pytest.raises(InterpretError, match="division by zero"):
        interpret(case.program(), *case.feed(arrays, 1, 1))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_torch(case, arrays, 1, 1)


@pytest.mark.parametrize("bad", [-1, 9])
def test_index_out_of_range_is_an_error_in_both(bad):
    case = next(c for c in op_cases.CASES if c.op == "embedding")
    arrays = case.arrays(2, 3)
    arrays[1][1, 2] = bad
    with pytest.raises(InterpretError, match=f"index {bad} is outside 0..8"):
        interpret(case.program(), *case.feed(arrays, 2, 3))
    with pytest.raises(IndexError):
        run_torch(case, arrays, 2, 3)


def test_opaque_runs_through_the_hook():
    case = next(c for c in op_cases.CASES if c.op == "exp" and c.label.startswith("exp-f32"))
    plain = case.program()
    op = Op(
        "opaque", (0,), (1,), {"target": "aten.tan.default", "args": '[[{"input": 0}], {}]'}, "net"
    )
    program = Program(
        plain.name, plain.types, plain.inputs, plain.weights, (op,), plain.outputs, 16, 16
    )
    check_program(program)
    feed = case.feed(case.arrays(2, 3), 2, 3)
    with pytest.raises(InterpretError, match="opaque"):
        interpret(program, *feed)
    found = interpret(program, *feed, run_opaque=lambda op, xs: (np.tan(xs[0]),))
    np.testing.assert_array_equal(found["y0"], np.tan(feed[0]["x0"]))


#: Special values are the very ones at which ops jump or end.
SMOOTH = [
    case
    for case in op_cases.CASES
    if any(arg and arg.type.dtype == "f32" for arg in case.args)
    and not any(arg and arg.fill == "special" for arg in case.args)
]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.label)
def test_case_is_well_conditioned(case):
    """Inputs that differ by their last bit move the outputs by less than half the tolerance.

    Else the order in which one CPU adds decides over the comparisons with this case.
    """

    def outputs(noise):
        rng = np.random.default_rng(0)
        tensors = []
        for arg, array in zip(case.args, arrays, strict=True):
            if arg is not None and arg.type.dtype == "f32":
                noisy = array * (1 + noise * rng.uniform(-1, 1, array.shape))  # in f64
                array = np.where(array == np.round(array), array, noisy)  # an exponent stays whole
                tensors.append(torch.from_numpy(np.asarray(array, np.float64)))
            else:
                tensors.append(None if arg is None else to_torch(array, arg.type.dtype))
        return [tensor.double().numpy() for tensor in apply_torch(case, tensors, rows, tokens)]

    for rows, tokens in case.sizes:
        arrays = case.arrays(rows, tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of var over too few elements
            for got, wanted in zip(outputs(2.0**-23), outputs(0.0), strict=True):
                tolerance = case.tolerance / 2
                np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
