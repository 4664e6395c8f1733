"""Known architectures for safetensors checkpoints: name -> module, samples, dynamic dims.

    mlp        sizes=[in, ..., out], activation="relu" | "gelu" | "tanh" | "silu"; 0.weight, ...
    bert       transformers' BertModel, kwargs of BertConfig; output `last_hidden_state`
    minilm     all-MiniLM-L6-v2: BertModel, masked mean, scaled to length 1; output `embedding`
    resnet18   transformers' ResNetForImageClassification; image=224, labels=1000; output `logits`

Tensors of the checkpoint must be those of the module; the error names the first that are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from coissue.deployments.capture.artifact import CaptureError

#: Module and samples. Where only a part of the module is in the checkpoint, it is `checkpointed`.
Built = tuple[nn.Module, dict[str, torch.Tensor]]
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU}


class Encoder(nn.Module):
    """BertModel on ids and mask; with `pool`, one vector of length 1 per row."""

    def __init__(self, pool: bool, **config: Any) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.checkpointed, self.pool = BertModel(BertConfig(**config)), pool

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = self.checkpointed(input_ids=input_ids, attention_mask=attention_mask)[0]
        if not self.pool:
            return {"last_hidden_state": hidden}
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return {"embedding": nn.functional.normalize(mean, dim=1)}


class Classifier(nn.Module):
    """Logits of a transformers image classifier."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.checkpointed = inner

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.checkpointed(pixel_values).logits}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def mlp(sizes: list[int], activation: str = "relu") -> Built:
    if activation not in ACTIVATIONS:
        raise CaptureError(f"model.kwargs: activation must be one of {sorted(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(sizes):
        layers += [nn.Linear(width, following), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1]), {"input": torch.randn(2, sizes[0], generator=_seeded())}


def _encoder(pool: bool, **config: Any) -> Built:
    module = Encoder(pool, **config)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    ids[0, 0] = module.checkpointed.config.vocab_size - 1  # the largest: see `sources`
    return module, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _minilm(**config: Any) -> Built:
    return _encoder(True, **(MINILM | config))


def _bert(**config: Any) -> Built:
    return _encoder(False, **config)


def _resnet18(image: int = 224, labels: int = 1000, **config: Any) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    form = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    settings = ResNetConfig(**(form | {"num_labels": labels} | config))
    module = Classifier(ResNetForImageClassification(settings))
    shape = (2, settings.num_channels, image, image)
    return module, {"pixel_values": torch.randn(shape, generator=_seeded())}


#: `settings.ModelSettings.architecture` has the same names.
ARCHITECTURES: dict[str, Callable[..., Built]] = {
    "mlp": mlp,
    "bert": _bert,
    "minilm": _minilm,
    "resnet18": _resnet18,
}


def build(name: str, checkpoint: str, kwargs: dict[str, Any]) -> Built:
    try:
        tensors = load_file(checkpoint)
    except Exception as error:
        said = f"not read as safetensors: {error}"
        raise CaptureError(f"model.checkpoint: {checkpoint!r}: {said}") from error
    try:
        module, samples = ARCHITECTURES[name](**kwargs)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"model.kwargs: {name}: {type(error).__name__}: {error}") from error
    _load_tensors(getattr(module, "checkpointed", module), tensors)
    return module, samples


def _load_tensors(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Fills `module`; tensors of its buffers that are not saved (position ids) may be there too."""
    wanted = module.state_dict()
    known = wanted.keys() | dict(module.named_buffers()).keys()
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in known]
    misshapen = [n for n in wanted if n in tensors and wanted[n].shape != tensors[n].shape]
    for what, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CaptureError(f"model.checkpoint: {what} {', '.join(names[:5])}{more}")
    for name in misshapen:
        raise CaptureError(
            f"model.checkpoint: {name} is {list(tensors[name].shape)}, "
            f"the architecture has {list(wanted[name].shape)}"
        )
    module.load_state_dict({name: tensors[name] for name in wanted})
