"""The op table: every op of the IR by name. This is the only list of ops.

`OPS[name]` says how many inputs an op takes, which attrs (all must be given unless optional), how
its output types follow from its inputs, and what it computes. `spec` and `interpreter` read
nothing else.

`opaque` names a functional ATen op from `OPAQUE_TARGETS` that only a device with torch can run.
Its attr `args` is JSON, `[[positional...], {keyword: ...}]`: `{"input": 0}` stands for an input of
the op, `{"dtype": "f32"}` for a dtype, the rest are numbers, strings, booleans, null and lists of
those. Its output types are as declared; whoever runs it compares them with what comes out.
"""

from __future__ import annotations

import json
from typing import Any, Final

from coissue.kernels.ir import DTYPE_BYTES, Dim, Type
from coissue.kernels.optable import base, layers, pointwise, recurrent, reductions, views
from coissue.kernels.optable.base import Attr, Call, Mismatch, OpDef, require

#: Functional, deterministic, data-only ATen ops (`torch.ops.aten.<target>`) allowed as `opaque`.
_OPAQUE: Final = """
    acos.default acosh.default addcmul.default asin.default asinh.default atan.default
    atan2.default atanh.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_xor.Tensor celu.default cosh.default cummax.default cumprod.default erfc.default
    exp2.default expm1.default fmod.Tensor frac.default glu.default hardtanh.default isinf.default
    isnan.default log10.default log2.default logcumsumexp.default logit.default logsumexp.default
    masked_fill.Scalar nan_to_num.default pixel_shuffle.default pixel_unshuffle.default
    prelu.default reflection_pad1d.default reflection_pad2d.default roll.default selu.default
    sinh.default softshrink.default sort.default tan.default topk.default tril.default triu.default
    trunc.default upsample_bilinear2d.vec upsample_nearest2d.vec
"""
OPAQUE_TARGETS: Final = frozenset(f"aten.{target}" for target in _OPAQUE.split())
#: Those whose inputs broadcast: the output must have that shape.
_BROADCASTING: Final = frozenset(
    f"aten.{name}"
    for name in ("addcmul.default", "atan2.default", "bitwise_and.Tensor", "bitwise_or.Tensor",
                 "bitwise_xor.Tensor", "fmod.Tensor", "masked_fill.Scalar")
)  # fmt: skip
#: Longest `args` of an opaque op, in characters.
OPAQUE_ARGS_LIMIT: Final = 4096


def parse_opaque_args(text: str, inputs: int) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments in `args`. Raises `Mismatch` on any other form."""
    require(len(text) <= OPAQUE_ARGS_LIMIT, f"args has over {OPAQUE_ARGS_LIMIT} characters")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    match parsed:
        case [list() as positional, dict() as keywords]:
            for value in (*positional, *keywords.values()):
                _check_argument(value, inputs)
            return positional, keywords
    require(False, "args is not JSON of the form [[...], {...}]")
    raise AssertionError


def _check_argument(value: Any, inputs: int, depth: int = 0) -> None:
    match value:
        case {"input": int(index), **rest} if not rest and type(index) is int:
            require(0 <= index < inputs, f"args names input {index} of {inputs}")
        case {"dtype": str(name), **rest} if not rest and name in DTYPE_BYTES:
            pass
        case list() if depth < 3:
            for item in value:
                _check_argument(item, inputs, depth + 1)
        case None | bool() | int() | float() | str():
            pass
        case _:
            require(False, f"args holds {str(value)[:80]!r}, which no argument may be")


def _infer_opaque(call: Call) -> tuple[Type, ...]:
    """Outputs are as declared. What an op makes may be large only where its inputs already are."""
    target = call.attrs["target"]
    require(target in OPAQUE_TARGETS, f"{target[:80]!r} is not on the list of allowed ATen ops")
    positional, _ = parse_opaque_args(call.attrs["args"], len(call.inputs))
    (shape, *_), inputs = (out.shape for out in call.outputs), range(len(call.inputs))
    if target in _BROADCASTING:
        base.require_shape(shape, base.broadcast((), *map(call.shape, inputs)), "the output")
    elif "upsample" in target:
        base.require_shape(
            shape, (*call.shape(0, [4])[:2], *_upsampled(call, positional)), "the output"
        )
    return call.outputs


def _upsampled(call: Call, positional: list[Any]) -> tuple[Dim, ...]:
    """The two spatial dims of an upsampled image, from a size or from factors, the last args."""
    match positional:
        case [{"input": 0}, [int(high), int(wide)], *_, None]:
            return Dim(high), Dim(wide)
        case [{"input": 0}, None, *_, [float(), float()] as by] if all(0 < f < 1024 for f in by):
            scaled = zip(call.shape(0)[2:], by, strict=True)
            return tuple(Dim(int(dim.scale * f), dim.rows, dim.tokens) for dim, f in scaled)
    raise Mismatch("an upsampling needs input 0 and a size or factors, of two numbers each, last")


def _run_opaque(*_: Any, **__: Any) -> Any:
    raise ValueError("an opaque op has no numpy meaning; pass run_opaque")


OPS: Final[dict[str, OpDef]] = {
    **pointwise.OPS,
    **reductions.OPS,
    **views.OPS,
    **layers.OPS,
    **recurrent.OPS,
    "opaque": OpDef(
        _infer_opaque,
        _run_opaque,
        required=0,
        variadic=True,
        attrs={"target": Attr("str"), "args": Attr("str")},
        outputs=0,
    ),
}
