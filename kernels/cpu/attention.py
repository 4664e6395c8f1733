"""Attention on the CPU, through torch's scaled_dot_product_attention.

`make` gives the op on logical shapes, or on packed ones whose sequences have a fixed length.
`make_ragged` gives it on packed tokens: segments come ordered by length, so those of one length are
neighbours and form one call; no token is padded. A query that may see no key gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
#: Rows of one length: (rows, tokens per row, first row, first token).
Run = tuple[int, int, int, int]

_sdpa = torch.nn.functional.scaled_dot_product_attention


def make(attrs: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The op as a function of q, k, v and, unless `mask` is "none", the mask."""
    causal, scale, kind = attrs["causal"], attrs["scale"], attrs["mask"]
    swap = attrs["layout"] == "bshd"

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if swap:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if mask is not None and kind == "key":
            mask = mask[:, None, None, :]
        if causal and mask is not None:
            mask = _with_causal(mask, q.shape[2], k.shape[2])
        y = _sdpa(q, k, v, mask, 0.0, causal and mask is None, scale=scale)
        return y.transpose(1, 2) if swap else y

    return run


def _with_causal(mask: Tensor, queries: int, keys: int) -> Tensor:
    seen = torch.ones(queries, keys, dtype=torch.bool).tril()
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, float("-inf"))


def make_ragged(attrs: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The op on q, k, v: (tokens, heads, size) and a key mask: (tokens,), by runs of one length."""
    whole = make(attrs)

    def run(
        runs: Sequence[Run], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        out = q.new_empty((q.shape[0], v.shape[1], v.shape[2])) if len(runs) != 1 else q
        for rows, length, _, start in runs:
            stop, shape = start + rows * length, (rows, length)
            if stop == start:
                continue
            part = whole(
                *(x[start:stop].view(*shape, *x.shape[1:]) for x in (q, k, v)),
                None if mask is None else mask[start:stop].view(shape),
            ).flatten(0, 1)
            if len(runs) == 1:
                return part
            out[start:stop] = part
        return out if len(runs) != 1 else q.new_empty((0, v.shape[1], v.shape[2]))

    return run
