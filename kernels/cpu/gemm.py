"""Providers of y = act(x @ w + b) on the CPU, and the table that says which is fastest where.

Rules: the table is measured on this machine, once per (K, N) and number of rows, within a stated
time, and kept in the cache folder under the processor's name; a provider that needs a copy of the
weight must win by `COPY_GAIN` to be chosen. Every provider computes each row from that row alone.

Providers: `kn` (MKL `addmm` with `out=` on (K, N) row-major weights), `mkl` (MKL's packed form),
`onednn` (oneDNN's packed form), `stack` (one `bmm` over equally long segments of different weights,
from a cached stack of them; entered in the table as ns per member). Only f32 has a choice.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coissue.kernels.cpu.store import StoredWeight, WeightStore
from coissue.kernels.files import MOST, load_json, save_json

#: Weight, bias and number of rows of one group in a launch.
Part = tuple[StoredWeight, StoredWeight | None, int]
#: Rows measured; a launch uses the entry nearest in ratio.
ROWS = (1, 4, 16, 64, 256)
#: In this order, as far as time allows. A few rows first: there `kn` may read weights at half the
#: speed of a packed form. By one row alone large weights would get `kn`, and coalescing nothing.
MEASURED = (4, 1, 16, 64, 256)
#: So many of them whatever it takes.
MEASURED_MIN = 2
#: A provider with a copy of its own must be this much faster than `kn`.
COPY_GAIN = 0.92
#: Time to measure one provider at one number of rows, and all of one (K, N).
POINT_NS = 1_000_000
SHAPE_NS = 80_000_000
#: Members of the measured stack, and the largest matrix (in elements) considered for one.
STACK_MEMBERS = 8
STACK_ELEMENTS = 1 << 18
#: The largest stack: what the last cache does not hold is read faster one by one (32 of 512 x 512
#: by a stack took 1.08 times as long, 16 of them 0.55).
STACK_BYTES = 1 << 24
#: The largest matrices together that are considered for one product.
JOINED_ELEMENTS = 1 << 24
#: Rows the packed forms are told to expect; they are correct for any number.
PACK_ROWS = 64

#: torch annotates it as answering nothing.
_split: Any = torch.split_with_sizes_copy
_ONLY_KN = (("kn", False),) * len(ROWS)
#: From (K, N) row-major. A build of torch without MKL or oneDNN has fewer.
_PACKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
# torch annotates neither function.
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
if HAS_ONEDNN and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
    _PACKERS["mkl"] = lambda kn: torch.ops.mkl._mkl_reorder_linear_weight(kn.t(), PACK_ROWS)
if HAS_ONEDNN:
    _PACKERS["onednn"] = lambda kn: torch.ops.mkldnn._reorder_linear_weight(kn.t().contiguous())


def device_name(threads: int) -> str:
    """What measured numbers depend on: processor, torch, threads."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, torch {torch.__version__}, {threads} threads"


class GemmTable:
    """(K, N) -> rows -> provider -> ns, measured when first asked for and kept as JSON.

    Measured alone, with weights in the cache: see `_pick` for what that does not show.

    What one process had no time for, `kn` serves there, and the next process measures.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._device = device
        self._ns: dict[str, dict[str, dict[str, int]]] = {}
        self._chosen: dict[tuple[int, int, bool], tuple[tuple[str, bool], ...]] = {}
        self._load()

    def choose(self, k: int, n: int, is_tokens: bool = False) -> tuple[tuple[str, bool], ...]:
        """Per entry of `ROWS`: the provider for equal weights (single tokens do not count: hardly a
        request has just one), and whether a stack pays."""
        if (key := (k, n, is_tokens)) not in self._chosen:
            table = self._ns.setdefault(f"{k}x{n}", {})
            if len(table) < len(ROWS):
                _measure(k, n, table)
                self._save()
            points = [table.get(str(rows), {}) for rows in ROWS]
            counted = points[1:] if is_tokens else points
            provider = _pick([point for point in counted if point])
            self._chosen[key] = tuple((provider, _stacks(point, provider)) for point in points)
        return self._chosen[key]

    def joins(self, k: int, widths: Sequence[int], is_tokens: bool) -> bool:
        """Whether one product of all these widths, by oneDNN, is faster than one of each."""
        if k * sum(widths) > JOINED_ELEMENTS:
            return False
        table = self._ns.setdefault(f"{k}x{'+'.join(map(str, widths))}", {})
        if not table and "onednn" in _PACKERS:
            store, end_ns = WeightStore(1 << 62), time.perf_counter_ns() + SHAPE_NS
            weights = [StoredWeight(str(i), torch.randn(k, n)) for i, n in enumerate(widths)]
            every = [(Gemm(store, self, k, (w.shape[1],), "kn", is_tokens), w) for w in weights]
            whole = [(Gemm(store, self, k, widths, "kn"), store.join(weights))]
            for x in (torch.randn(rows, k) for rows in MEASURED):
                calls = {"apart": partial(_run, x, every), "joined": partial(_run, x, whole)}
                table[str(len(x))] = _time_each(calls)
                if len(table) >= MEASURED_MIN and time.perf_counter_ns() > end_ns:
                    break
            self._save()
        points = [ns for rows, ns in table.items() if not (is_tokens and rows == "1")]
        limit = COPY_GAIN if "kn" in (self.choose(k, n, is_tokens)[0][0] for n in widths) else 1.0
        score = sum(math.log(ns["joined"] / ns["apart"]) for ns in points)
        return score < len(points) * math.log(limit)

    def _load(self) -> None:
        found = load_json(self._path, self._device).get("ns")
        shapes = found if isinstance(found, dict) else {}
        self._ns = {shape: rows for shape, rows in shapes.items() if _is_measured(shape, rows)}

    def _save(self) -> None:
        save_json(self._path, {"device": self._device, "ns": self._ns})


def _is_measured(shape: str, rows: object) -> bool:
    """Numbers of rows with times of providers, `kn` among them; of joined products of both ways."""
    needed = {"apart", "joined"} if "+" in shape else {"kn"}
    return isinstance(rows, dict) and all(
        number.isdecimal()
        and isinstance(ns, dict)
        and needed <= ns.keys()
        and all(type(time) is int and 0 < time < MOST for time in ns.values())
        for number, ns in rows.items()
    )


def _pick(points: Sequence[Mapping[str, int]]) -> str:
    """One provider for all numbers of rows: with two, weights would be in memory twice, and each
    launch that takes another one than the last would find them out of the cache."""
    best, limit = "kn", len(points) * math.log(COPY_GAIN)
    for name in _PACKERS:
        if points and all(name in ns for ns in points):
            score = sum(math.log(ns[name] / ns["kn"]) for ns in points)
            if score < limit:
                best, limit = name, score
    return best


def _stacks(ns: Mapping[str, int], provider: str) -> bool:
    return ns.get("stack", math.inf) < ns.get(provider, 0) * COPY_GAIN


def _measure(k: int, n: int, table: dict[str, dict[str, int]]) -> None:
    """Fills in the numbers of rows missing in `table`, on random data, as far as time allows."""
    kn, bias = torch.randn(k, n), torch.randn(n)
    packed = {name: make(kn) for name, make in _PACKERS.items()}
    end_ns = time.perf_counter_ns() + SHAPE_NS
    for rows in (rows for rows in MEASURED if str(rows) not in table):
        x = torch.randn(rows, k)
        calls: dict[str, Callable[[], object]] = {"kn": partial(torch.addmm, bias, x, kn)}
        for name, form in packed.items():
            calls[name] = partial(_call_packed, name, x, form, kn.t(), bias)
        if k * n <= STACK_ELEMENTS:
            xs, biases = x.repeat(STACK_MEMBERS, 1, 1), bias.repeat(STACK_MEMBERS, 1, 1)
            calls["stack"] = partial(torch.baddbmm, biases, xs, kn.repeat(STACK_MEMBERS, 1, 1))
        table[str(rows)] = ns = _time_each(calls)
        if "stack" in ns:
            ns["stack"] //= STACK_MEMBERS
        if len(table) >= MEASURED_MIN and time.perf_counter_ns() > end_ns:
            break


def _call_packed(
    name: str, x: torch.Tensor, form: torch.Tensor, nk: torch.Tensor, bias: torch.Tensor | None
) -> Any:
    if name == "mkl":
        return torch.ops.mkl._mkl_linear.default(x, form, nk, bias, x.shape[0])
    return torch.ops.mkldnn._linear_pointwise.default(x, form, bias, "none", [], "")


def _time_each(calls: Mapping[str, Callable[[], object]]) -> dict[str, int]:
    """The least ns of each over rounds of all, so that a busy moment of the machine hits all."""
    end_ns = time.perf_counter_ns() + POINT_NS * len(calls)
    best, rounds = dict.fromkeys(calls, 1 << 62), 0
    while rounds < 3 or (rounds < 50 and time.perf_counter_ns() < end_ns):
        for name, call in calls.items():
            start_ns = time.perf_counter_ns()
            call()
            best[name] = min(best[name], time.perf_counter_ns() - start_ns)
        rounds += 1
    return best


def _entry(rows: int) -> int:
    """The index in `ROWS` of the number nearest in ratio."""
    return min(len(ROWS) - 1, rows.bit_length() // 2)


def _run(x: torch.Tensor, products: Sequence[tuple[Gemm, StoredWeight]]) -> None:
    for multiply, weight in products:
        multiply.split(multiply.one(x, weight, None))


class Gemm:
    """y = x @ w + b for weights in a store; one per `linear` op of a plan. x: (rows, K).

    `layout` is that of the op: "nk" weights are (N, K), "kn" weights (K, N). Without a table,
    `kn` runs always: a choice that depends on neither time nor memory. Of several widths: with
    joined weights, which only oneDNN takes as one; where there is no room for that, one by one.
    """

    def __init__(
        self, store: WeightStore, table: GemmTable | None, k: int, widths: Sequence[int],
        layout: str, is_tokens: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self._store = store
        self._layout = layout
        self._widths, self._n = list(widths), sum(widths)
        #: MKL asks for the weight's shape alone.
        self._nk = torch.empty(1).expand(self._n, k)
        self._chosen, is_joined = _ONLY_KN, len(widths) > 1
        if table and dtype is torch.float32 and (not is_joined or k * self._n <= STACK_ELEMENTS):
            self._chosen = table.choose(k, self._n, is_tokens)
        if is_joined:
            self._chosen = tuple(("onednn", stacks) for _, stacks in self._chosen)

    def split(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """`y` by widths, in memory of their own: no slower than views, of which what reads them may
        make copies, and each of which would keep the memory of all."""
        if len(self._widths) == 1:
            return (y,)
        made: Sequence[torch.Tensor] = _split(y, self._widths, 1)
        return made

    def one(self, x: torch.Tensor, w: StoredWeight, b: StoredWeight | None) -> torch.Tensor:
        """All rows with the same weights."""
        rows = x.shape[0]
        bias = None if b is None else self._vector(b)
        if rows:
            name = self._chosen[_entry(rows)][0]
            form = None if name == "kn" else self._packed(w, name)
            if form is not None:
                made: torch.Tensor = _call_packed(name, x, form, self._nk, bias)
                return made
        if w.parts:  # there is no room for the joined form
            biases = b.parts if b else [None] * len(w.parts)
            return torch.cat([self.one(x, *part) for part in zip(w.parts, biases, strict=True)], 1)
        kn = w.as_kn(self._layout)
        return torch.mm(x, kn) if bias is None else torch.addmm(bias, x, kn)

    def _packed(self, w: StoredWeight, name: str) -> torch.Tensor | None:
        form = f"{name} {self._layout}"
        if form in w.forms:
            return w.forms[form]
        return self._store.derive(w, form, lambda: _PACKERS[name](w.as_kn(self._layout)))

    def _vector(self, b: StoredWeight) -> torch.Tensor:
        if b.parts and "plain" not in b.forms:
            self._store.derive(b, "plain", lambda: b.plain)
        return b.plain

    def each(self, x: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        """Consecutive rows of x, each part with its own weights and bias."""
        rows = parts[0][2]
        if self._chosen[_entry(rows)][1]:
            stacked = self._stacked(x, parts, rows)
            if stacked is not None:
                return stacked
        out, stop = x.new_empty((x.shape[0], self._n)), 0
        kn = self._chosen[_entry(rows)][0] == "kn"
        for w, b, rows in parts:
            start, stop = stop, stop + rows
            part, into = x[start:stop], out[start:stop]
            if not kn:  # by the provider of launches of one weight, or those would be faster
                into.copy_(self.one(part, w, b))
            elif b is None:
                torch.mm(part, w.as_kn(self._layout), out=into)
            else:
                torch.addmm(self._vector(b), part, w.as_kn(self._layout), out=into)
        return out

    def _stacked(self, x: torch.Tensor, parts: Sequence[Part], rows: int) -> torch.Tensor | None:
        num_bytes = sum(part[0].num_bytes for part in parts)
        if not rows or num_bytes > STACK_BYTES or any(part[2] != rows for part in parts):
            return None
        kn = self._store.stack(tuple(part[0] for part in parts), self._layout)
        if kn is None:
            return None
        xs = x.reshape(len(parts), rows, x.shape[1])
        biases = tuple(part[1] for part in parts if part[1] is not None)
        if not biases:
            return torch.bmm(xs, kn).view(x.shape[0], self._n)
        bias = self._store.stack(biases, "bias")
        return None if bias is None else torch.baddbmm(bias, xs, kn).view(x.shape[0], self._n)
