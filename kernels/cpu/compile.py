"""A kernel as a plan: every op resolved to a step, a function of the launch's frame.

Made once per signature. Values are numbered into slots, so a plan serves all kernels of its
signature, whatever their value ids. Constants are computed here; values that follow from weights
alone once per weight set (`Plan.environment`); the rest at each launch. A step whose inputs depend
on weights runs once per group if the segments' weights differ; all other steps run once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from coissue.kernels.cpu import exact, gemm, ops, segments, stitched
from coissue.kernels.cpu.conv import Conv, find_norm
from coissue.kernels.cpu.frame import Frame, Packing, join, pack
from coissue.kernels.cpu.gemm import Gemm, GemmTable
from coissue.kernels.cpu.native import Build, Call, number_values
from coissue.kernels.cpu.native_recurrent import NativeRecurrence
from coissue.kernels.cpu.store import StoredWeight, WeightStore
from coissue.kernels.ir import ABSENT, Op
from coissue.kernels.lowered import Kernel, Layout, Lowered, Mode
from coissue.kernels.passes.fold import find_folds, find_siblings
from coissue.kernels.passes.layouts import POINTWISE

Step = Callable[[Frame], None]
#: Fills slots that follow from weights or constants alone.
Fill = Callable[[list[Any]], None]
#: Ops that answer with a tensor of their own, which the next op may overwrite.
_FRESH = frozenset(("linear", "conv", "matmul", "add", "sub", "mul", "div", "layer_norm",
                    "batch_norm", "rms_norm", "group_norm", *ops.IN_PLACE))  # fmt: skip
#: Ops whose inputs are aligned from the right.
_BROADCASTS = POINTWISE | {"matmul", "expand", "attention"}
#: Slot that always holds None, for inputs not given.
_NONE = 0


class Plan:
    """A compiled kernel. Slots: see `Frame.env`."""

    __slots__ = ("_constants", "_once", "_parts", "_values", "_weights", "exact", "inputs",
                 "outputs", "signature", "steps")  # fmt: skip

    def __init__(
        self, lowered: Lowered, kernel: Kernel, store: WeightStore, table: GemmTable,
        blocks: exact.BlockSizes,
    ) -> None:  # fmt: skip
        builder = _Builder(lowered, kernel, store, None if kernel.exact else table)
        self.signature = kernel.signature
        self.exact = kernel.exact
        #: (slot, packing) of each of the kernel's inputs and outputs, in its order.
        self.inputs = [(builder.slots[v], builder.packing(v)) for v in kernel.inputs]
        self.outputs = [(builder.slots[v], builder.packing(v)) for v in kernel.outputs]
        #: Each with the slots no later step reads. Replaced as a whole, between launches or while
        #: one goes through the steps of before.
        self.steps: stitched.Steps = [(p.step, p.kills) for p in builder.parts]
        self._parts = dict(zip(builder.places, builder.parts, strict=True))
        #: Slot and packing by place of value (`native.number_values`).
        self._values = builder.tensors(number_values(kernel))
        if kernel.exact:
            constants = builder.env
            self.steps = exact.arrange(
                builder.parts, [slot for slot, _ in self.outputs],
                lambda part, length: blocks.of(part, constants, length),
            )  # fmt: skip
        self._constants: list[Any] = builder.env
        #: (slot, position in `kernel.weights`, whether it wants the tensor).
        self._weights = builder.weight_slots
        #: In order.
        self._once: list[Fill] = builder.once

    def adopt(self, build: Build, load: Callable[[Call], Any]) -> None:
        """Runs of ops have native forms from the next launch on. From any thread.

        Raises what `load` raises."""
        runs: list[tuple[Sequence[int], stitched.Native]] = [
            (run.ops, stitched.NativeRun(run, self._values, load)) for run in build.runs
        ]
        slots = {place: slot for place, (slot, _) in self._values.items()}
        for each in build.recurrences:
            op = self._parts[each.op].op
            runs.append(((each.op,), NativeRecurrence(op, each.call, slots, load)))
        if runs:
            self.steps = stitched.arrange(self._parts, runs)

    def environment(self, weights: Sequence[StoredWeight]) -> list[Any]:
        """The slots as a launch finds them: constants, weights, and all that follows from them."""
        env = list(self._constants)
        env[stitched.CACHE] = {}
        for slot, position, as_tensor in self._weights:
            env[slot] = weights[position].plain if as_tensor else weights[position]
        for fill in self._once:
            fill(env)
        return env


class _Builder:
    """Walks the kernel's ops once. `slots`: value -> slot; weights have slots per use."""

    def __init__(
        self, lowered: Lowered, kernel: Kernel, store: WeightStore, table: GemmTable | None
    ) -> None:
        self._lowered, self._kernel, self._store, self._table = lowered, kernel, store, table
        self.env: list[Any] = [None, None]
        self.slots: dict[int, int] = {ABSENT: _NONE}
        self.parts: list[exact.Part] = []
        #: Of each part: its op's place in `Kernel.ops`.
        self.places: list[int] = []
        self.once: list[Fill] = []
        self.weight_slots: list[tuple[int, int, bool]] = []
        self._weight_slot: dict[tuple[int, bool], int] = {}
        #: Slots of FIXED operands that lost axes -> their shape.
        self._short: dict[int, tuple[int, ...]] = {}
        #: Slots that hold what follows from weights, and those that hold constants.
        self._weighted: set[int] = set()
        self._constant: set[int] = {_NONE}
        #: Slots whose tensor nothing else shares.
        self._fresh: set[int] = set()
        self._uses = Counter(v for op in kernel.ops for v in op.inputs)
        for value in kernel.inputs:
            self.slots[value] = self._new_slot()
        #: Place of a convolution -> of the batch norm folded into it, which gets no step.
        self._folds = find_folds(lowered, kernel)
        #: Place of a product -> of those that run with it, which get no step either.
        self._joins = find_siblings(lowered, kernel, table.joins) if table else {}
        first = {other: place for place, others in self._joins.items() for other in others}
        order = sorted((first.get(place, place), place) for place in range(len(kernel.ops)))
        self._last_use = {v: when for when, place in order for v in kernel.ops[place].inputs}
        for index, (op, mode) in enumerate(zip(kernel.ops, kernel.modes, strict=True)):
            if index not in (*self._folds.values(), *first):
                self._add(op, mode, index)

    def tensors(self, values: Sequence[int]) -> dict[int, tuple[int, Packing]]:
        """Slot and packing, by index in `values`, of those that are tensors in the environment."""
        found = {}
        for index, value in enumerate(values):
            slot = self.slots.get(value, self._weight_slot.get((value, True)))
            if slot is not None:
                found[index] = slot, self.packing(value)
        return found

    def packing(self, value: int) -> Packing:
        return Packing(self._lowered.layouts[value], self._lowered.program.types[value])

    def _new_slot(self, value: Any = None) -> int:
        self.env.append(value)
        return len(self.env) - 1

    def _input_slot(self, value: int, *, as_tensor: bool = True) -> int:
        if value not in self._kernel.weights:
            return self.slots[value]
        key = (value, as_tensor)
        if key not in self._weight_slot:
            slot = self._weight_slot[key] = self._new_slot()
            self.weight_slots.append((slot, self._kernel.weights.index(value), as_tensor))
            self._weighted.add(slot)
        return self._weight_slot[key]

    def _add(self, op: Op, mode: Mode, index: int) -> None:
        if mode is Mode.ONCE:
            self._add_once(op)
            return
        made = None
        if index in self._joins:
            together = [op, *(self._kernel.ops[place] for place in self._joins[index])]
            made = self._linear(*together)
            op = Op("linear", op.inputs, tuple(each.outputs[0] for each in together), op.attrs)
        elif index in self._folds:
            norm = self._kernel.ops[self._folds[index]]
            made = self._folded(op, norm)
            op = Op("conv", op.inputs[:2], norm.outputs, op.attrs)
        elif mode is Mode.PACKED and op.name in ("linear", "conv") and self._from_store(op):
            made = self._linear(op) if op.name == "linear" else self._conv(op)
        if made is None:
            ins = tuple(self._input_slot(v) for v in op.inputs)
            if mode is Mode.PACKED:
                ins = tuple(map(self._aligned, [op] * len(ins), op.inputs, ins))
            make = {Mode.PACKED: self._packed, Mode.SEGMENTS: self._segments, Mode.EACH: self._each}
            made = self._grouped(op, ins, make[mode](op, ins)), ins
        step, ins = made
        dead = {v for v in op.inputs if self._last_use[v] == index} - set(self._kernel.outputs)
        kills = {self.slots[v] for v in dead if v in self.slots}
        kept = self._weighted | self._constant
        pairs = list(zip(op.inputs, ins, strict=False))
        self.places.append(index)
        self.parts.append(
            exact.Part(
                op, mode, step, tuple(kills - kept),
                tuple((slot, self.packing(v)) for v, slot in pairs if slot not in kept),
                tuple((self.slots[v], self.packing(v)) for v in op.outputs),
                tuple(self._describe(v, slot) for v, slot in pairs if slot in self._weighted),
            )
        )  # fmt: skip
        if mode is Mode.PACKED and op.name in _FRESH:
            self._fresh.update(self.slots[value] for value in op.outputs)

    def _describe(self, value: int, slot: int) -> tuple[int, tuple[int, ...], str, bool]:
        """Slot, shape and dtype of what follows from weights; whether it is a stored weight."""
        type_ = self.packing(value).type
        is_stored = self._weight_slot.get((value, False)) == slot
        return slot, self._short.get(slot, type_.at(0, 0)), type_.dtype, is_stored

    def _outs(self, op: Op) -> tuple[int, ...]:
        for value in op.outputs:
            self.slots[value] = self._new_slot()
        return tuple(self.slots[value] for value in op.outputs)

    def _resolve(self, op: Op, *, packed: bool) -> tuple[Any, bool]:
        types = [self._lowered.program.types[v] if v != ABSENT else None for v in op.inputs]
        out = self.packing(op.outputs[0])
        shift = max(self.packing(op.inputs[0]).lead - 1, 0) if packed and op.inputs else 0
        shape = out.packed_shape if packed else out.type.at
        fn, sized = ops.resolve(op, types, out.type, shape, shift)
        return (exact.on_whole_vectors(fn) if self._is_wide(op) else fn), sized

    def _is_wide(self, op: Op) -> bool:
        is_float = ops.DTYPES[self.packing(op.outputs[0]).type.dtype].is_floating_point
        return self._kernel.exact and is_float and op.name in exact.WIDE

    def _add_once(self, op: Op) -> None:
        ins, outs = tuple(self._input_slot(v) for v in op.inputs), self._outs(op)
        fn, sized = self._resolve(op, packed=False)

        def fill(env: list[Any]) -> None:
            made = fn(*((0, 0) if sized else ()), *(env[slot] for slot in ins))
            if op.name == "opaque":
                _check_declared(op, map(self.packing, op.outputs), made, 0, 0)
            # Exact blocks were tried with operands as torch lays them out, not with views.
            own = tuple(map(exact.settled, _parts(made))) if self._kernel.exact else made
            _put(env, outs, own)

        self._fill_once(ins, outs, fill)

    def _fill_once(self, ins: tuple[int, ...], outs: tuple[int, ...], fill: Fill) -> None:
        """Now, if the inputs are constants, else once per weight set."""
        if self._constant.issuperset(ins):
            fill(self.env)
            self._constant.update(outs)
        else:
            self.once.append(fill)
            self._weighted.update(outs)

    def _aligned(self, op: Op, value: int, slot: int) -> int:
        """The slot of a FIXED operand without the axes that would meet a packed axis."""
        out = self.packing(op.outputs[0])
        if op.name not in _BROADCASTS or value == ABSENT or self.packing(value).is_packed:
            return slot
        keep = len(out.type.shape) - out.lead
        shape = self.packing(value).type.at(0, 0)
        if op.name == "matmul":
            keep = max(keep, min(2, len(shape)))
        if len(shape) <= keep:
            return slot
        made, short = self._new_slot(), shape[len(shape) - keep :]
        self._short[made] = short

        def fill(env: list[Any]) -> None:
            env[made] = env[slot].reshape(short)

        self._fill_once((slot,), (made,), fill)
        return made

    # --- steps: one launch --------------------------------------------------------------------

    def _packed(self, op: Op, ins: tuple[int, ...]) -> Step:
        fn, sized = self._resolve(op, packed=True)
        if not self._is_wide(op):
            fn, ins = self._reusable(op, ins) or (fn, ins)
        return _call(fn, ins, self._outs(op), sized=sized)

    def _reusable(self, op: Op, ins: tuple[int, ...]) -> tuple[Any, tuple[int, ...]] | None:
        """The op written into an input that nothing else reads, if there is one."""
        out, values = self._lowered.program.types[op.outputs[0]], op.inputs
        if op.name in ops.IN_PLACE and self._is_free(values[0], ins[0], out):
            return ops.IN_PLACE[op.name](op.attrs, ops.DTYPES[out.dtype]), ins
        if op.name in ("add", "mul"):
            fn = torch.Tensor.add_ if op.name == "add" else torch.Tensor.mul_
            for first, second in ((0, 1), (1, 0)):
                if self._is_free(values[first], ins[first], out):
                    return fn, (ins[first], ins[second])
        return None

    def _is_free(self, value: int, slot: int, out: Any) -> bool:
        return (
            slot in self._fresh
            and self._uses[value] == 1
            and value not in self._kernel.outputs
            and self._lowered.program.types[value] == out
            and self.env[slot] is None
        )

    def _segments(self, op: Op, ins: tuple[int, ...]) -> Step:
        fn = segments.resolve(op, self.packing(op.outputs[0]))
        outs = self._outs(op)

        def step(frame: Frame) -> None:
            made = fn(frame, *[frame.env[slot] for slot in ins])
            _put(frame.env, outs, made)

        return step

    def _each(self, op: Op, ins: tuple[int, ...]) -> Step:
        fn, sized = self._resolve(op, packed=False)
        packings = [None if v == ABSENT else self.packing(v) for v in op.inputs]
        out_packings = [self.packing(v) for v in op.outputs]
        reads = list(zip(ins, packings, strict=True))
        writes = list(zip(self._outs(op), out_packings, strict=True))
        check = partial(_check_declared, op, out_packings) if op.name == "opaque" else None
        return _call_each(fn, reads, writes, check, sized=sized)

    def _from_store(self, op: Op) -> bool:
        """Whether weight and bias are weights of the program, not computed from them."""
        return all(v in self._kernel.weights for v in op.inputs[1:] if v != ABSENT)

    def _stored_slots(self, op: Op) -> tuple[int, int, int]:
        """The slots of the input, the stored weight and the stored bias."""
        x, w, *bias = op.inputs
        stored = [_NONE if v == ABSENT else self._input_slot(v, as_tensor=False) for v in bias]
        return self.slots[x], self._input_slot(w, as_tensor=False), (*stored, _NONE)[0]

    def _conv(self, op: Op) -> tuple[Step, tuple[int, ...]] | None:
        """A convolution with weights from the store, and its slots; None where torch is as good."""
        type_ = self.packing(op.inputs[0]).type
        if type_.dtype != "f32" or len(type_.shape) != 4 or not gemm.HAS_ONEDNN:
            return None
        ins = self._stored_slots(op)
        conv = Conv(self._store, op.attrs, exact=self._kernel.exact)
        call = _call(conv, ins, self._outs(op))
        return self._grouped(op, ins, call), ins

    def _folded(self, op: Op, norm: Op) -> tuple[Step, tuple[int, ...]]:
        """A convolution with the batch norm behind it in its weights, and its slots."""
        x, w, b = self._stored_slots(op)
        given = [
            _NONE if v == ABSENT else self._input_slot(v, as_tensor=False)
            for v in (*norm.inputs[1:], ABSENT, ABSENT)[:4]
        ]
        eps, found = norm.attrs["eps"], self._new_slot()
        assert isinstance(eps, int | float), "`spec` lets nothing else through"

        def fill(env: list[Any]) -> None:
            env[found] = find_norm([env[slot] for slot in (b, *given)], eps)

        self._fill_once((w, *given), (found,), fill)
        ins = x, w, found
        call = _call(Conv(self._store, op.attrs, exact=False), ins, self._outs(norm))
        return self._grouped(Op("conv", op.inputs[:2], norm.outputs, op.attrs), ins, call), ins

    def _linear(self, op: Op, *others: Op) -> tuple[Step, tuple[int, ...]]:
        """A GEMM with weights from the store, for others of its input too, and its slots."""
        x, together = self.packing(op.inputs[0]), (op, *others)
        widths = [self.packing(one.outputs[0]).type.shape[-1].scale for one in together]
        k, layout, dtype = x.type.shape[-1].scale, str(op.attrs["layout"]), ops.DTYPES[x.type.dtype]
        is_tokens = x.layout is Layout.TOKENS
        multiply = Gemm(self._store, self._table, k, widths, layout, is_tokens, dtype)
        stored = [self._stored_slots(one) for one in together]
        ins = self._joined(stored) if others else stored[0]
        outs = [slot for one in together for slot in self._outs(one)]
        return _multiply(multiply, x, ins, outs), ins

    def _joined(self, stored: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
        """The slots of the input, and of the weights and biases as one."""
        store, w, b = self._store, self._new_slot(), self._new_slot()

        def fill(env: list[Any]) -> None:
            for slot, *parts in zip((w, b), *(slots[1:] for slots in stored), strict=True):
                env[slot] = store.join([env[part] for part in parts]) if env[parts[0]] else None

        self._fill_once(stored[0][1:], (w, b), fill)
        return stored[0][0], w, b

    def _grouped(self, op: Op, ins: tuple[int, ...], step: Step) -> Step:
        """The step once per group where weights differ."""
        if not self._weighted.intersection(ins):
            return step
        own = [
            (slot, self.packing(v))
            for v, slot in zip(op.inputs, ins, strict=False)
            if slot not in self._weighted and slot not in self._constant
        ]
        made = [(self.slots[v], self.packing(v)) for v in op.outputs]

        def grouped(frame: Frame) -> None:
            if not frame.split:
                step(frame)
                return
            for group in frame.split:
                for slot, packing in own:
                    group.env[slot] = group.of_group(packing, frame.env[slot])
                step(group)
            for slot, packing in made:
                frame.env[slot] = join(packing, [group.env[slot] for group in frame.split])

        return grouped


def _put(env: list[Any], outs: tuple[int, ...], made: Any) -> None:
    for slot, value in zip(outs, _parts(made), strict=True):
        env[slot] = value


def _parts(made: Any) -> tuple[Any, ...]:
    """The outputs of an op, of which most have just one."""
    return made if isinstance(made, tuple) else (made,)


def _call(fn: Any, ins: tuple[int, ...], outs: tuple[int, ...], sized: bool = False) -> Step:
    """The step that calls `fn` on whole tensors; the common forms without building a list."""
    out = outs[0]
    if sized or len(outs) > 1 or len(ins) not in (1, 2):

        def step(frame: Frame) -> None:
            env, sizes = frame.env, (frame.rows, frame.tokens) if sized else ()
            made = fn(*sizes, *[env[slot] for slot in ins])
            _put(env, outs, made)

    elif len(ins) == 1:
        (only,) = ins

        def step(frame: Frame) -> None:
            frame.env[out] = fn(frame.env[only])

    else:
        left, right = ins

        def step(frame: Frame) -> None:
            frame.env[out] = fn(frame.env[left], frame.env[right])

    return step


def _multiply(
    multiply: Gemm, packing: Packing, ins: tuple[int, int, int], outs: Sequence[int]
) -> Step:
    """The step of a GEMM. `packing`: of its input."""
    x_slot, w_slot, b_slot = ins
    middle, k = packing.type.shape[packing.lead : -1], packing.type.shape[-1].scale
    each = math.prod(dim.scale for dim in middle)

    def step(frame: Frame) -> None:
        env = frame.env
        x = env[x_slot]
        flat = x.reshape(-1, k) if middle else x
        if frame.split:
            y = multiply.each(flat, [
                (g.env[w_slot], g.env[b_slot], packing.entries(g.rows, g.tokens) * each)
                for g in frame.split
            ])  # fmt: skip
        else:
            y = multiply.one(flat, env[w_slot], env[b_slot])
        for out, part in zip(outs, multiply.split(y), strict=True):
            env[out] = part.view(*x.shape[:-1], part.shape[1]) if middle else part

    return step


def _call_each(
    fn: Any, reads: Sequence[tuple[int, Packing | None]], writes: Sequence[tuple[int, Packing]],
    check: Callable[[Any, int, int], None] | None, *, sized: bool,
) -> Step:  # fmt: skip
    """The step that calls `fn` per request, on its part of each input; slots with packings."""

    def step(frame: Frame) -> None:
        env, made = frame.env, []
        for i, length in enumerate(frame.lengths):
            rows = frame.row_bounds[i + 1] - frame.row_bounds[i]
            args = [None if p is None else frame.part(p, env[slot], i) for slot, p in reads]
            one = fn(rows, length, *args) if sized else fn(*args)
            if check is not None:
                check(one, rows, length)
            made.append(_parts(one))
        for (slot, packing), parts in zip(writes, zip(*made, strict=True), strict=True):
            env[slot] = pack(packing, parts) if packing.is_packed else list(parts)

    return step


def _check_declared(op: Op, outs: Iterable[Packing], made: Any, rows: int, tokens: int) -> None:
    """An opaque op's outputs are as the program declares, which all later ops rely on."""
    for packing, tensor in zip(outs, _parts(made), strict=True):
        wanted = packing.type.at(rows, tokens), ops.DTYPES[packing.type.dtype]
        if (tuple(tensor.shape), tensor.dtype) != wanted:
            raise ValueError(
                f"{op.attrs['target']} at {op.where} made {tuple(tensor.shape)} {tensor.dtype}, "
                f"but the program declares {wanted[0]} {wanted[1]}."
            )
