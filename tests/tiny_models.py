"""Small untrained models as factories, for tests that serve them: `factory: "tiny_models:mlp"`."""

from __future__ import annotations

import itertools

import torch
from torch import nn


def _seeded(seed: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp(seed: int = 0, width: int = 16):
    return _seeded(seed, 8, width, 4), {"input": torch.randn(3, 8)}


def headed(seed: int = 0, classes: int = 3):
    """One backbone for all seeds, a head of its own each."""
    backbone = _seeded(1234, 32, 64, 64)
    torch.manual_seed(seed)
    return nn.Sequential(backbone, nn.ReLU(), nn.Linear(64, classes)), {"input": torch.randn(3, 32)}


class Tagger(nn.Module):
    """Tokens in, one row of scores out: an embedding, an LSTM, the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.cell = nn.LSTM(8, 12, batch_first=True)
        self.out = nn.Linear(12, 3)

    def forward(self, input_ids):
        hidden, _ = self.cell(self.table(input_ids))
        return self.out(hidden.mean(1))


def tagger(seed: int = 0):
    torch.manual_seed(seed)
    return Tagger(), {"input_ids": torch.randint(0, 50, (2, 5))}


class Shifted(Tagger):
    """Looks up the id after the one given: the last id has none."""

    def forward(self, input_ids):
        return super().forward(input_ids + 1)


def shifted():
    torch.manual_seed(0)
    return Shifted(), {"input_ids": torch.randint(0, 49, (2, 5))}


def wide(seed: int = 0):
    """More than 64 KiB in and out, so that tensors go through shared memory."""
    torch.manual_seed(seed)
    return nn.Linear(4096, 4096), {"input": torch.randn(2, 4096)}


def slow(layers: int = 12, width: int = 1024):
    """Some milliseconds per row."""
    torch.manual_seed(0)
    stack = [nn.Linear(width, width) for _ in range(layers)]
    return nn.Sequential(*stack), {"input": torch.randn(2, width)}


class Norms(nn.Module):
    """Mostly memory-bound ops, in runs on both sides of a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        x = self.before(x)
        gated = torch.softmax(x, -1) * nn.functional.gelu(self.mix(x))
        return self.after(gated + x)


def norms(seed: int = 0, width: int = 48):
    torch.manual_seed(seed)
    return Norms(width), {"input": torch.randn(3, width)}


def half(seed: int = 0):
    """bf16 throughout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model.to(torch.bfloat16), {"input": torch.randn(3, 16).to(torch.bfloat16)}


def unimportable():
    raise ImportError("the tenant's dependency is missing")


class Decomposed(nn.Module):
    """Its singular values are beyond the ops that are served."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input):
        return torch.linalg.svdvals(self.inner(input)[:, None])


def unexportable():
    return Decomposed(), {"input": torch.randn(2, 8)}
