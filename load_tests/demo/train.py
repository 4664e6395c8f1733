"""Set-up step of the demo: train every tenant and keep weights and eager answers in `.cache/demo`.

Idempotent: what is there for the same sources is kept. Deterministic: fixed seeds, one thread.
Run: `python -m load_tests.demo.train`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from load_tests.demo import data, models
from load_tests.demo.minilm import load_minilm

TOKENIZER = data.CACHE / "tokenizer.json"
#: {task: {"labels", "accuracy", "predictions", "targets"}} of the eager modules on the test sets.
EAGER = data.CACHE / "eager.json"
STAMP = data.CACHE / "stamp"
#: Epochs over the whole training set at once (heads), or in batches (the rest).
HEAD_EPOCHS = 300
EPOCHS = {"digits-wide": 12, "digits-deep": 25, "digits-lstm": 40}
TABLE_EPOCHS = 60


def read_stamp() -> str:
    """A digest of all that the results depend on."""
    digest = hashlib.sha256(torch.__version__.encode())
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("data/*.tsv"), *folder.glob("*.py")]):
        if path.name != "run.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def is_trained() -> bool:
    files = [TOKENIZER, EAGER, *(models.weights_path(task) for task in data.TASKS)]
    return (
        STAMP.is_file()
        and STAMP.read_text() == read_stamp()
        and all(path.is_file() for path in files)
    )


def fit(module: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, rate: float) -> None:
    torch.manual_seed(1)
    optimiser = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=0.01)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimiser.step()
    module.eval()


@torch.no_grad()
def embed(backbone: nn.Module, tokenizer: Tokenizer, head: models.TextHead, text: str) -> Tensor:
    """The pooled vector (1, 384) of one sentence, without padding, as it is served."""
    ids = torch.tensor([tokenizer.encode(text).ids])
    mask = torch.ones_like(ids)
    return head.pool(backbone(ids, mask), mask)


def train_text(task: str, backbone: nn.Module, tokenizer: Tokenizer) -> dict[str, Any]:
    texts, head = data.read_texts(task), models.build_module(task)
    assert isinstance(head, models.TextHead)
    train_x = torch.cat([embed(backbone, tokenizer, head, text) for text, _ in texts.train])
    test_x = torch.cat([embed(backbone, tokenizer, head, text) for text, _ in texts.test])
    train_y = torch.tensor([label for _, label in texts.train])
    fit(head.layers, train_x, train_y, HEAD_EPOCHS, len(train_x), 0.01)
    save_file(head.state_dict(), models.weights_path(task))
    return judge(head.layers, test_x, [label for _, label in texts.test], texts.labels)


def train_arrays(task: str) -> dict[str, Any]:
    arrays, module = data.read_arrays(task), models.build_module(task)
    train_x, train_y = torch.from_numpy(arrays.train_x), torch.from_numpy(arrays.train_y)
    for part in module.children():
        if isinstance(part, models.Standardise):
            part.fit(train_x)
    fit(module, train_x, train_y, EPOCHS.get(task, TABLE_EPOCHS), 32, 0.003)
    save_file(module.state_dict(), models.weights_path(task))
    test_x = torch.from_numpy(arrays.test_x)
    return judge(module, test_x, arrays.test_y.tolist(), arrays.labels)


@torch.no_grad()
def judge(
    module: nn.Module, x: Tensor, targets: list[int], labels: tuple[str, ...]
) -> dict[str, Any]:
    predictions = module(x).argmax(-1).tolist()
    accuracy = float(np.mean(np.array(predictions) == np.array(targets)))
    return {
        "labels": list(labels),
        "accuracy": accuracy,
        "predictions": predictions,
        "targets": targets,
    }


def train(console: Console) -> None:
    """Make everything the demo's tenants need, unless it is there."""
    if is_trained():
        console.print(f"demo weights: kept in {data.CACHE.relative_to(data.ROOT)}")
        return
    data.CACHE.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    shutil.copyfile(data.backbone_folder() / "tokenizer.json", TOKENIZER)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.no_padding()
    tokenizer.save(str(TOKENIZER))
    backbone = load_minilm(data.backbone_folder())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    eager: dict[str, Any] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress, quiet():
        bar = progress.add_task("training", total=len(data.TASKS))
        for task in data.TASKS:
            progress.update(bar, description=f"training {task}")
            eager[task] = (
                train_text(task, backbone, tokenizer)
                if task in data.TEXT_TASKS
                else train_arrays(task)
            )
            progress.advance(bar)
    EAGER.write_text(json.dumps(eager, indent=1) + "\n")
    STAMP.write_text(read_stamp())
    for task, facts in eager.items():
        console.print(f"  {task:14} eager test accuracy {facts['accuracy']:.3f}")


def quiet() -> warnings.catch_warnings[Any]:
    """No warnings of the libraries between the progress lines."""
    return warnings.catch_warnings(action="ignore")


if __name__ == "__main__":
    train(Console())
