"""Models to try coissue with, as configs/minimal.yaml does."""

from __future__ import annotations

import torch
from torch import nn


def ranker(features: int = 6, labels: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small untrained classifier of rows of numbers: a module and samples, with rows first."""
    model = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, labels))
    return model, {"features": torch.randn(3, features)}
