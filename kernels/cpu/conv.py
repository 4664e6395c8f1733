"""2d convolution in f32 through oneDNN with weights packed once, channels last.

Against `conv2d` on the program's own layout this took 0.4 to 0.95 of the time (64 to 512 channels,
7 to 56 pixels wide, 1 to 4 images). Activations stay channels last from one convolution to the
next; their logical shape is the same. Without room for the packed weight, `conv2d` runs; in exact
mode, where room must not show, the weight is packed for the call, and always for one image.

A batch norm behind it is folded into the packed weight and the bias. An activation is not, though
oneDNN could: its ReLU and its clamp make zeros of NaNs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from coissue.kernels.cpu.store import StoredWeight, WeightStore


class Norm(NamedTuple):
    """A batch norm as y = x * scale + bias over channels, of one weight set."""

    scale: torch.Tensor
    #: With what the convolution's own bias becomes.
    bias: torch.Tensor
    #: Tells its scale from that of other norms behind the same weight.
    name: str


def find_norm(weights: Sequence[StoredWeight | None], eps: float) -> Norm:
    """`weights`: the convolution's bias, then mean, variance, gain and shift of the norm."""
    own, mean, var, gain, shift = (None if w is None else w.plain for w in weights)
    assert mean is not None
    assert var is not None
    scale = (var + eps).rsqrt()
    scale = scale if gain is None else scale * gain
    bias = (-mean if own is None else own - mean) * scale
    name = " ".join(["norm", str(eps), *("-" if w is None else w.digest for w in weights[2:4])])
    return Norm(scale, bias if shift is None else bias + shift, name)


class Conv:
    """One `conv` op of a plan whose weights are in a store."""

    __slots__ = ("_exact", "_form", "_store", "_window")

    def __init__(self, store: WeightStore, attrs: Mapping[str, Any], *, exact: bool) -> None:
        self._store, self._exact = store, exact
        window = [list(attrs[name]) for name in ("stride", "padding", "dilation")]
        self._window = (*window, attrs["groups"])
        self._form = f"{'exact ' if exact else ''}conv {self._window}"

    def __call__(
        self, x: torch.Tensor, w: StoredWeight, b: StoredWeight | Norm | None
    ) -> torch.Tensor:
        """`b`: its bias, or the batch norm behind it with its bias in it."""
        norm, bias = (b, b.bias) if isinstance(b, Norm) else (None, None if b is None else b.plain)
        form = self._form if norm is None else f"{self._form} {norm.name}"
        x = x.contiguous(memory_format=torch.channels_last)
        packed = w.forms.get(form)
        if packed is None:
            shape = [1 if self._exact else x.shape[0], *x.shape[1:]]
            packed = self._store.derive(w, form, lambda: self._pack(w, norm, shape))
            if packed is None and self._exact:
                packed = self._pack(w, norm, shape)
        if packed is None or not x.shape[0]:
            if norm is None:
                return F.conv2d(x, w.plain, bias, *self._window)
            made = F.conv2d(x, w.plain, None, *self._window)
            return made.mul_(norm.scale[:, None, None]).add_(norm.bias[:, None, None])
        stride, padding, dilation, groups = self._window
        found: torch.Tensor = torch.ops.mkldnn._convolution_pointwise.default(
            x, packed, bias, padding, stride, dilation, groups, "none", [], ""
        )
        return found

    def _pack(self, w: StoredWeight, norm: Norm | None, shape: list[int]) -> Any:
        stride, padding, dilation, groups = self._window
        plain = w.plain if norm is None else w.plain * norm.scale[:, None, None, None]
        return torch.ops.mkldnn._reorder_convolution_weight(
            plain, padding, stride, dilation, groups, shape
        )
