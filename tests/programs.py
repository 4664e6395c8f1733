"""Programs for the tests of passes and devices, built by hand, with their weights.

model = bert(layers=1)
model.program, model.weights        a Program that `spec` accepts, arrays by digest
model.request(rows, tokens, rng)    inputs by name
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coissue.kernels.interpreter import NUMPY_DTYPES
from coissue.kernels.ir import ABSENT, Dim, Op, Port, Program, R, T, Type, Weight, fixed
from coissue.kernels.optable.base import Call, Mismatch
from coissue.kernels.optable.table import OPS
from coissue.kernels.spec import check_program

ROWS_LIMIT, TOKENS_LIMIT = 16, 16
ONE = Dim(1)
RT = Dim(1, 1, 1)


def shape(*dims: int | Dim) -> tuple[Dim, ...]:
    return tuple(dim if isinstance(dim, Dim) else Dim(dim) for dim in dims)


@dataclass(frozen=True)
class Model:
    program: Program
    weights: dict[str, np.ndarray]
    fills: dict[str, Callable]

    def request(self, rows: int, tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        found = {}
        for port in self.program.inputs:
            type_ = self.program.types[port.value]
            array = self.fills[port.name](rng, type_.at(rows, tokens))
            found[port.name] = np.asarray(array).astype(NUMPY_DTYPES[type_.dtype])
        return found


def normal(rng, size):
    return rng.normal(size=size)


def below(limit):
    return lambda rng, size: rng.integers(0, limit, size=size)


def key_mask(rng, size):
    """At least one key per row, ones first."""
    lengths = rng.integers(1, size[1] + 1, size=(size[0], 1))
    return np.arange(size[1]) < lengths


class Builder:
    def __init__(self, name="test", seed=0, tokens_limit=TOKENS_LIMIT):
        self.name, self.tokens_limit = name, tokens_limit
        self.rng = np.random.default_rng(seed)
        self.types, self.inputs, self.named, self.ops = [], [], [], []
        self.arrays, self.fills = {}, {}

    def _value(self, type_: Type) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def input(self, name, *dims, dtype="f32", fill=normal) -> int:
        value = self._value(Type(shape(*dims), dtype))
        self.inputs.append(Port(name, value))
        self.fills[name] = fill
        return value

    def weight(self, *dims: int, dtype="f32", array=None, scale=0.3) -> int:
        if array is None:
            array = self.rng.normal(size=dims) * scale
        array = np.asarray(array).astype(NUMPY_DTYPES[dtype])
        value = self._value(Type(fixed(*array.shape), dtype))
        digest = hashlib.sha256(f"{dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
        self.named.append(Weight(f"w{len(self.named)}", value, digest))
        self.arrays[digest] = array
        return value

    def op(self, name, *inputs, out=None, dtype=None, **attrs):
        """The output value (a tuple for several). `out`: dims that cannot be inferred."""
        given = [None if value == ABSENT else self.types[value] for value in inputs]
        definition = OPS[name]
        missing = definition.required + definition.optional - len(given)
        declared = ()
        if out is not None or dtype is not None:
            first = given[0].shape if out is None else shape(*out)
            declared = (Type(first, dtype or (given[0].dtype if given else "f32")),)
        full = {key: attrs.get(key) for key in definition.attrs}
        call = Call((*given, *[None] * missing), full, declared, ROWS_LIMIT, self.tokens_limit)
        outputs = tuple(self._value(type_) for type_ in definition.infer(call))
        self.ops.append(Op(name, tuple(inputs), outputs, attrs, f"{self.name}.{len(self.ops)}"))
        return outputs[0] if len(outputs) == 1 else outputs

    def try_op(self, name, *inputs, **kwargs):
        """As `op`; None if the types do not fit."""
        try:
            return self.op(name, *inputs, **kwargs)
        except Mismatch:
            return None

    def constant(self, value, dtype="f32") -> int:
        return self.op("constant", out=(), dtype=dtype, value=value)

    def arange(self, dim, start=0) -> int:
        return self.op("arange", out=(dim,), dtype="i64", start=start, step=1)

    def build(self, **outputs: int) -> Model:
        program = self._program(outputs)
        check_program(program)
        return Model(program, self.arrays, self.fills)

    def _program(self, outputs) -> Program:
        """Weights last in `types` or first: ids only have to be defined before use."""
        return Program(
            name=self.name,
            types=tuple(self.types),
            inputs=tuple(self.inputs),
            weights=tuple(self.named),
            ops=tuple(self.ops),
            outputs=tuple(Port(name, value) for name, value in outputs.items()),
            rows_limit=ROWS_LIMIT,
            tokens_limit=self.tokens_limit,
        )

    # --- layers -----------------------------------------------------------------------------

    def linear(self, x, n) -> int:
        k = self.types[x].shape[-1].scale
        return self.op("linear", x, self.weight(n, k), self.weight(n), layout="nk")

    def norm(self, x) -> int:
        size = self.types[x].shape[-1].scale
        return self.op("layer_norm", x, self.weight(size), self.weight(size), axes=1, eps=1e-5)

    def heads(self, x, count) -> int:
        size = self.types[x].shape[-1].scale
        x = self.op("reshape", x, out=(R, T, count, size // count))
        return self.op("permute", x, dims=(0, 2, 1, 3))

    def attend(self, x, mask=ABSENT, heads=2, causal=False) -> int:
        size = self.types[x].shape[-1].scale
        q, k, v = (self.heads(self.linear(x, size), heads) for _ in range(3))
        kind = "none" if mask == ABSENT else "full"
        attrs = {"causal": causal, "scale": 0.25, "layout": "bhsd", "mask": kind}
        y = self.op("attention", q, k, v, mask, **attrs)
        y = self.op("permute", y, dims=(0, 2, 1, 3))
        return self.linear(self.op("reshape", y, out=(R, T, size)), size)


def mlp(sizes=(4, 8, 3), seed=0) -> Model:
    b = Builder("mlp", seed, tokens_limit=0)
    x = b.input("x", R, sizes[0])
    for index, size in enumerate(sizes[1:]):
        x = b.linear(x if index == 0 else b.op("relu", x), size)
    return b.build(y=x)


def bert(layers=1, size=8, classes=3, seed=0, pool="first", head_seed=None) -> Model:
    """As `torch.export` has BERT: positions from a buffer, a mask by `index` with arange(R)."""
    b = Builder("bert", seed)
    ids = b.input("ids", R, T, dtype="i64", fill=below(11))
    attend = b.input("attend", R, T, dtype="i64", fill=key_mask)
    buffer = b.weight(array=np.arange(TOKENS_LIMIT)[None], dtype="i64")
    spots = b.op("slice", buffer, out=(1, T), dtype="i64", dim=1, start=0, stop=None, step=1)
    kinds = b.weight(array=np.zeros((1, TOKENS_LIMIT)), dtype="i64")
    kinds = b.op("gather", b.op("expand", kinds, out=(1, TOKENS_LIMIT)), spots, dim=1)
    x = b.op("embedding", b.weight(11, size), ids)
    x = b.op("add", x, b.op("embedding", b.weight(2, size), b.op("expand", kinds, out=(R, T))))
    x = b.op("add", x, b.op("embedding", b.weight(TOKENS_LIMIT, size), spots))
    x = b.norm(x)
    mask = bert_mask(b, b.op("cast", attend, dtype="bool"))
    for _ in range(layers):
        x = b.norm(b.op("add", b.attend(x, mask), x))
        h = b.op("gelu", b.linear(x, 2 * size), approximate="none")
        x = b.norm(b.op("add", b.linear(h, size), x))
    if head_seed is not None:
        b.rng = np.random.default_rng(head_seed)
    if pool == "first":
        pooled = b.op("select", x, dim=1, index=0)
    else:
        pooled = b.op("mean", x, dims=(1,), keepdim=False)
    return b.build(y=b.linear(b.op("tanh", b.linear(pooled, size)), classes))


def bert_mask(b: Builder, attend: int) -> int:
    zero, true = b.constant(0, "i64"), b.op("full", out=(), dtype="bool", value=True)
    rows = b.op("reshape", b.arange(R), out=(R, 1, 1, 1))
    queries = b.op("reshape", b.op("add", b.arange(T), zero), out=(1, 1, T, 1))
    keys = b.op("reshape", b.op("add", b.arange(T), zero), out=(1, 1, 1, T))
    inside = b.op("logical_and", true, b.op("ge", queries, zero))
    seen = b.op("index", attend, rows, keys, dims=(0, 1))
    return b.op("expand", b.op("logical_and", inside, seen), out=(R, 1, T, T))


def gpt(layers=1, size=8, seed=0) -> Model:
    """As `torch.export` has GPT-2: causal mask from position ids, GELU written out."""
    b = Builder("gpt", seed)
    ids = b.input("ids", R, T, dtype="i64", fill=below(11))
    spots = b.op("reshape", b.op("add", b.arange(T), b.constant(0, "i64")), out=(1, T))
    x = b.op("embedding", b.weight(11, size), ids)
    x = b.op("add", x, b.op("embedding", b.weight(TOKENS_LIMIT, size), spots))
    mask = gpt_mask(b, spots)
    for _ in range(layers):
        x = b.op("add", b.attend(b.norm(x), mask), x)
        flat = b.op("reshape", b.norm(x), out=(RT, size))
        wide = b.op("linear", flat, b.weight(size, 16), b.weight(16), layout="kn")
        h = gelu_by_hand(b, b.op("reshape", wide, out=(R, T, 16)))
        x = b.op("add", x, b.linear(h, size))
    return b.build(y=b.norm(x))


def gelu_by_hand(b: Builder, x: int, factor=0.044715) -> int:
    inner = b.op("mul", b.op("pow", x, b.constant(3.0)), b.constant(factor))
    inner = b.op("mul", b.op("add", x, inner), b.constant(0.7978845608028654))
    gate = b.op("add", b.op("tanh", inner), b.constant(1.0))
    return b.op("mul", b.op("mul", x, b.constant(0.5)), gate)


def gpt_mask(b: Builder, spots: int) -> int:
    """Causal, and only within one packed sequence, of which default positions hold one."""
    by_row = b.op("expand", spots, out=(R, T))
    first = b.op("slice", by_row, dim=1, start=0, stop=1, step=1)
    prepended = b.op("sub", first, b.constant(1, "i64"))
    before = b.op("clamp", b.arange(T, start=-1), min=0, max=None)
    shifted = b.op("index", by_row, before, dims=(1,))
    is_first = b.op("lt", b.arange(T, start=-1), b.constant(0, "i64"))
    gap = b.op("sub", by_row, b.op("where", is_first, prepended, shifted))
    breaks = b.op("ne", gap, b.constant(1, "i64"))
    number = b.op("cumsum", b.op("cast", breaks, dtype="i64"), dim=1)
    rows = b.op("reshape", b.arange(R), out=(R, 1, 1, 1))
    queries = b.op("reshape", b.arange(T), out=(1, 1, T, 1))
    keys = b.op("reshape", b.arange(T), out=(1, 1, 1, T))
    at = {
        (name, side): b.op("index", value, rows, spot, dims=(0, 1))
        for name, value in (("spot", by_row), ("number", number))
        for side, spot in (("query", queries), ("key", keys))
    }
    causal = b.op("le", at["spot", "key"], at["spot", "query"])
    same = b.op("eq", at["number", "query"], at["number", "key"])
    return b.op("expand", b.op("logical_and", causal, same), out=(R, 1, T, T))


def cnn(seed=0) -> Model:
    """A residual block with batch norms, pooling and a head."""
    b = Builder("cnn", seed, tokens_limit=0)

    def conv(x, channels, kernel=3):
        into = b.types[x].shape[1].scale
        window = {"stride": (1, 1), "padding": (kernel // 2,) * 2, "dilation": (1, 1), "groups": 1}
        y = b.op("conv", x, b.weight(channels, into, kernel, kernel), ABSENT, out=(), **window)
        mean, w, bias = (b.weight(channels) for _ in range(3))
        var = b.weight(array=b.rng.uniform(0.5, 2.0, channels))
        return b.op("batch_norm", y, mean, var, w, bias, eps=1e-5)

    x = b.input("x", R, 2, 6, 6)
    x = b.op("relu", conv(x, 4))
    y = conv(b.op("clamp", conv(x, 6), min=0.0, max=6.0), 6)
    x = b.op("relu", b.op("add", y, conv(x, 6, kernel=1)))
    x = b.op("adaptive_avg_pool", x, size=(1, 1))
    return b.build(y=b.linear(b.op("reshape", x, out=(R, 6)), 3))


def lstm(bidirectional=True, cell="lstm", seed=0) -> Model:
    """Two layers; the answer is from the last layer's last states."""
    b = Builder("lstm", seed)
    x = b.input("x", R, T, 3)
    hidden, gates, directions = 4, {"lstm": 4, "gru": 3}[cell], 2 if bidirectional else 1
    weights = []
    for layer in range(2):
        into = 3 if layer == 0 else directions * hidden
        for _ in range(directions):
            sizes = ((into,), (hidden,), (), ())
            weights += [b.weight(gates * hidden, *size) for size in sizes]
    attrs = {"hidden": hidden, "layers": 2, "bidirectional": bidirectional, "bias": True}
    y, h, *_ = b.op(cell, x, *weights, **attrs)
    last = [b.op("select", h, dim=0, index=i) for i in (-2, -1)[-directions:]]
    x = b.op("concat", *last, dim=1) if bidirectional else last[0]
    return b.build(y=b.linear(x, 2), all=y)


def dlrm(seed=0) -> Model:
    b = Builder("dlrm", seed, tokens_limit=0)
    dense = b.input("dense", R, 4)
    picks = b.input("picks", R, 2, 3, dtype="i64", fill=below(7))
    x = b.op("relu", b.linear(dense, 8))
    bags = [
        b.op("embedding_bag", b.weight(7, 8), b.op("select", picks, dim=1, index=i), mode="sum")
        for i in range(2)
    ]
    z = b.op("concat", *(b.op("reshape", v, out=(R, 1, 8)) for v in (x, *bags)), dim=1)
    pairs = b.op("matmul", z, b.op("permute", z, dims=(0, 2, 1)))
    low = [b.weight(array=part, dtype="i64") for part in np.tril_indices(3, -1)]
    crossed = b.op("index", pairs, *low, dims=(1, 2))
    x = b.op("concat", x, crossed, dim=1)
    return b.build(y=b.op("sigmoid", b.linear(b.op("relu", b.linear(x, 8)), 1)))


def batch_statistics() -> Model:
    """Mixes the rows of a request, counts them and uses their numbers: never packed."""
    b = Builder("statistics", tokens_limit=0)
    x = b.input("x", R, 4)
    mean = b.op("mean", x, dims=(0,), keepdim=True)
    number = b.op("cast", b.op("reshape", b.arange(R), out=(R, 1)), dtype="f32")
    count = b.op("sum", b.op("full", out=(R,), dtype="f32", value=1.0), dims=(0,), keepdim=False)
    y = b.op("mul", b.op("add", b.op("sub", x, mean), number), count)
    return b.build(y=b.linear(y, 3), sorted=b.op("cumsum", b.op("flip", y, dims=(0,)), dim=0))


def turned_weights() -> Model:
    """Weights that are read through views: turned, cut and spread ones."""
    b = Builder("turned", tokens_limit=0)
    x, wide = b.input("x", R, 6), b.weight(6, 12)
    turned = b.op("permute", b.weight(6, 6), dims=(1, 0))
    part = b.op("slice", wide, dim=1, start=3, stop=9, step=1)
    y = b.op("matmul", x, turned)
    z = b.op("linear", b.op("relu", y), part, ABSENT, layout="kn")
    gain = b.op("select", b.op("permute", wide, dims=(1, 0)), dim=0, index=1)
    z = b.op("layer_norm", z, gain, gain, axes=1, eps=1e-5)
    scaled = b.op("mul", turned, b.op("expand", b.op("reshape", gain, out=(6, 1)), out=(6, 6)))
    return b.build(y=y, z=b.op("linear", z, scaled, ABSENT, layout="nk"))


def gram() -> Model:
    """Products of a request's rows with each other: run request by request."""
    b = Builder("gram", tokens_limit=0)
    y = b.linear(b.input("x", R, 6), 6)
    pairs = b.op("matmul", y, b.op("permute", b.linear(y, 6), dims=(1, 0)))
    return b.build(y=b.op("matmul", pairs, b.linear(y, 5)))


MODELS = {
    "mlp": mlp, "turned": turned_weights, "gram": gram, "bert": bert,
    "bert_mean": lambda: bert(pool="mean"), "gpt": gpt, "cnn": cnn, "lstm": lstm,
    "gru": lambda: lstm(False, "gru"), "dlrm": dlrm, "statistics": batch_statistics,
}  # fmt: skip
