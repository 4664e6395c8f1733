"""all-MiniLM-L6-v2's encoder in plain torch: the weights of the checkpoint, nothing of its library.

The same function as `transformers.BertModel` without the pooler (a test compares them). Twelve
captures start it six times, and importing the library costs more than the export. Shapes:
ids and mask (rows, tokens) i64, hidden (rows, tokens, 384) f32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

LAYERS, HEADS, HIDDEN, INNER = 6, 12, 384, 1536
VOCABULARY, POSITIONS = 30522, 512
EPS = 1e-12
#: Names of a layer's parts in the checkpoint -> here.
PARTS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "norm_attention",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.norm_attention = nn.LayerNorm(HIDDEN, EPS)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, EPS)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        parts = (part(hidden) for part in (self.query, self.key, self.value))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = self.norm_attention(hidden + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.norm(hidden + self.down(nn.functional.gelu(self.up(hidden))))


class MiniLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        #: The one token type's vector is added in.
        self.positions = nn.Embedding(POSITIONS, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, EPS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.norm(self.words(input_ids) + self.positions(places))
        mask = attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


def load_minilm(folder: Path) -> MiniLm:
    """The encoder with the weights of `folder`/model.safetensors, in eval mode."""
    given = load_file(folder / "model.safetensors")
    weights = {
        "words.weight": given["embeddings.word_embeddings.weight"],
        "positions.weight": given["embeddings.position_embeddings.weight"]
        + given["embeddings.token_type_embeddings.weight"][0],
        "norm.weight": given["embeddings.LayerNorm.weight"],
        "norm.bias": given["embeddings.LayerNorm.bias"],
    }
    for index in range(LAYERS):
        for theirs, ours in PARTS.items():
            for kind in ("weight", "bias"):
                weights[f"layers.{index}.{ours}.{kind}"] = given[
                    f"encoder.layer.{index}.{theirs}.{kind}"
                ]
    with torch.device("meta"):
        encoder = MiniLm()
    encoder.load_state_dict(weights, assign=True)
    return encoder.requires_grad_(False).eval()
