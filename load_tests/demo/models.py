"""The demo's models as factories: `factory: "load_tests.demo.models:text_classifier"`.

A factory returns (module, sample inputs); dimension 0 of every input is the rows, and `input_ids`
and `attention_mask` are (rows, tokens). The modules are ordinary torch code and know nothing of
the scheduler. With `untrained=True` nothing is read from the cache folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from load_tests.demo.data import CACHE, ROOT, backbone_folder
from load_tests.demo.minilm import HIDDEN, load_minilm

Samples = dict[str, Tensor]
#: Width of the hidden layer of a text head; 0: a single linear layer.
HEAD_WIDTHS = {
    "sentiment": 0, "topic": 64, "spam": 0, "urgency": 64, "language": 0, "question": 128,
}  # fmt: skip


class TextHead(nn.Module):
    """Mean of the tokens under the mask, normalised, then one or two linear layers."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Linear(HIDDEN, classes)
        if width:
            self.layers = nn.Sequential(
                nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, classes)
            )

    def pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(self.pool(hidden, attention_mask))


class TextClassifier(nn.Module):
    def __init__(self, backbone: nn.Module, head: TextHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids, attention_mask), attention_mask)


class Standardise(nn.Module):
    """(x - mean) / scale with the training set's values as buffers."""

    mean: Tensor
    scale: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def fit(self, x: Tensor) -> None:
        self.mean.copy_(x.mean(0))
        self.scale.copy_(x.std(0).clamp(min=1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


class DigitLstm(nn.Module):
    """The rows of a digit as a sequence; the last state decides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, width, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.lstm(x / 16)
        return self.out(state[-1])


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 16


def build_digits_wide() -> nn.Module:
    return nn.Sequential(
        Scale(),
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def build_digits_deep() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        Scale(), *block(1, 16), *block(16, 16), nn.AvgPool2d(2), *block(16, 32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def build_table(features: int, classes: int) -> nn.Module:
    return nn.Sequential(
        Standardise(features), nn.Linear(features, 32), nn.ReLU(),
        nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, classes),
    )  # fmt: skip


def build_module(task: str) -> nn.Module:
    """The module of `task` without its trained weights (a text task: its head alone)."""
    torch.manual_seed(sum(task.encode()))
    if task in HEAD_WIDTHS:
        classes = {"sentiment": 2, "spam": 2, "urgency": 3}.get(task, 5)
        return TextHead(classes, HEAD_WIDTHS[task])
    builders: dict[str, Any] = {
        "digits-wide": build_digits_wide,
        "digits-deep": build_digits_deep,
        "digits-lstm": lambda: DigitLstm(96),
        "iris": lambda: build_table(4, 3),
        "wine": lambda: build_table(13, 3),
        "breast-cancer": lambda: build_table(30, 2),
    }
    return builders[task]()


def weights_path(task: str) -> Path:
    return CACHE / f"{task}.safetensors"


def _load_trained(task: str, untrained: bool) -> nn.Module:
    from safetensors.torch import load_file

    module = build_module(task)
    if not untrained:
        path = weights_path(task)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path.relative_to(ROOT)} is missing: run `python -m load_tests.demo.train` first"
            )
        module.load_state_dict(load_file(path))
    return module.eval()


def text_classifier(task: str, untrained: bool = False) -> tuple[nn.Module, Samples]:
    """The shared MiniLM backbone with the head of `task`."""
    head = _load_trained(task, untrained)
    assert isinstance(head, TextHead)
    ids = torch.randint(1000, 30000, (3, 11), generator=torch.Generator().manual_seed(0))
    samples = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return TextClassifier(load_minilm(backbone_folder()), head).eval(), samples


def digits(task: str, untrained: bool = False) -> tuple[nn.Module, Samples]:
    """A digit classifier: `digits-wide`, `digits-deep` (1, 8, 8) or `digits-lstm` (8, 8)."""
    shape = (3, 8, 8) if task == "digits-lstm" else (3, 1, 8, 8)
    x = torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(0)).float()
    name = "x" if task == "digits-lstm" else "input"
    return _load_trained(task, untrained), {name: x}


def table(task: str, untrained: bool = False) -> tuple[nn.Module, Samples]:
    """A classifier of one of scikit-learn's tabular sets."""
    features = {"iris": 4, "wine": 13, "breast-cancer": 30}[task]
    x = torch.rand((3, features), generator=torch.Generator().manual_seed(0)) * 5
    return _load_trained(task, untrained), {"input": x}
