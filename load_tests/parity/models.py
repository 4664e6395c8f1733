"""The models of the parity runs, as factories for the product and as modules for the baseline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 1024
CLASSES = 16
TENANTS = 12
#: Floats of the empty model's 2 KB body.
EMPTY_FLOATS = 512


class Empty(nn.Module):
    """One op on one number: only the path costs anything."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x[:, :1])


def empty() -> tuple[nn.Module, dict[str, Tensor]]:
    return Empty(), {"x": torch.ones(3, EMPTY_FLOATS)}


def build_backbone(head: int) -> nn.Module:
    """4 x (1024x1024 + ReLU), equal in every tenant, and the 16-wide head number `head`."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    torch.manual_seed(1 + head)
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).eval()


def backbone(head: int) -> tuple[nn.Module, dict[str, Tensor]]:
    x = torch.rand((3, WIDTH), generator=torch.Generator().manual_seed(0))
    return build_backbone(head), {"input": x}


def stack(seed: int, layers: int, width: int, rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """`layers` times linear and ReLU with weights of its own; a request has about `rows` rows."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts).eval(), {"input": torch.rand(max(2, rows), width)}
