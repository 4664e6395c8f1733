"""Modules that capture must refuse, each for one reason, and factories that break the contract."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    """`rule` is the forward; its parts are submodules or parameters."""

    def __init__(self, rule, **parts):
        super().__init__()
        self.rule = rule
        self.register_buffer("count", torch.zeros(4))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.rule(self, x)


class Outer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


def table(rows):
    return nn.Parameter(torch.randn(1, rows, 4))


def _write_buffer(m, x):
    m.count += 1
    return x + m.count


def _write_input(m, x):
    x.add_(1)
    return x * 2


def _count_calls(m, x):
    m.calls = getattr(m, "calls", 0) + 1
    return x * m.calls


def _pack(m, x):
    lengths = torch.tensor([7] * 3)
    return m.cell(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1]


def _lstm(**options):
    return nn.LSTM(4, 4, batch_first=True, **options)


#: name -> (forward, parts, has tokens)
RULES = {
    "random": (lambda m, x: x + torch.rand_like(x), {}, False),
    "writes_buffer": (_write_buffer, {}, False),
    "writes_input": (_write_input, {}, False),
    "branch_on_values": (lambda m, x: x if x.sum() > 0 else -x, {}, False),
    "shape_from_values": (lambda m, x: x[x > 0], {}, False),
    "number_from_tensor": (lambda m, x: x * x.sum().item(), {}, False),
    "cond": (lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), {}, False),
    "numpy_random": (lambda m, x: x * float(np.random.rand()), {}, False),
    "numpy_inside": (lambda m, x: x + torch.from_numpy(x.numpy()), {}, False),
    "counts_calls": (_count_calls, {}, False),
    "batch_statistics": (
        lambda m, x: m.norm(x), {"norm": nn.BatchNorm1d(4, track_running_stats=False)}, False,
    ),
    "no_such_op": (lambda m, x: torch.linalg.svd(x)[1], {}, False),
    "complex": (lambda m, x: torch.fft.fft(x).real, {}, False),
    "branch_on_rows": (lambda m, x: x if x.shape[0] > 2 else -x, {}, False),
    "fixed_rows": (lambda m, x: x.reshape(3, 4) + 1, {}, False),
    "even_same": (lambda m, x: m.conv(x[..., None]),
                  {"conv": nn.Conv1d(4, 4, 2, padding="same")}, False),
    "one_more_token": (lambda m, x: torch.cat([x, x[:, :1]], 1), {}, True),
    "few_positions": (lambda m, x: x + m.table[:, : x.shape[1]], {"table": table(16)}, True),
    "few_embeddings": (
        lambda m, x: x + m.table(torch.arange(x.shape[1])), {"table": nn.Embedding(16, 4)}, True,
    ),
    "initial_state": (lambda m, x: m.cell(x, (x[None, :, 0], x[None, :, 0]))[0],
                      {"cell": _lstm()}, True),
    "packed": (_pack, {"cell": _lstm()}, False),
    "projected": (lambda m, x: m.cell(x)[0], {"cell": _lstm(proj_size=2)}, True),
    "text_output": (lambda m, x: {"a": x, "b": "text"}, {}, False),
    "no_output": (lambda m, x: None, {}, False),
    "raises": (lambda m, x: x.no_such_method(), {}, False),
}  # fmt: skip


def refused(name):
    torch.manual_seed(0)
    rule, parts, has_tokens = RULES[name]
    x = torch.randn(3, 7, 4) if has_tokens or name == "packed" else torch.randn(3, 4)
    return Outer(Block(rule, **parts)), {"x": x}, {"x": ("rows", "tokens")} if has_tokens else {}


class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def gate():
    return Gate(), {"x": torch.ones(3, 4)}


def raising():
    raise FileNotFoundError("weights.bin is missing")


#: What factories return -> part of the sentence.
RETURNED = {
    "number": 3,
    "module_alone": nn.Linear(4, 4),
    "no_dict": (nn.Linear(4, 4), torch.randn(2, 4)),
    "one_row": (nn.Linear(4, 4), {"x": torch.randn(1, 4)}),
    "unequal_rows": (nn.Bilinear(4, 4, 4), {"a": torch.randn(2, 4), "b": torch.randn(3, 4)}),
    "not_tensor": (nn.Linear(4, 4), {"x": [1.0]}),
    "stray_dynamic": (nn.Linear(4, 4), {"x": torch.randn(2, 4)}, {"y": ("rows",)}),
    "bad_dynamic": (nn.Linear(4, 4), {"x": torch.randn(2, 4)}, {"x": ("tokens",)}),
    "complex_input": (nn.Identity(), {"x": torch.randn(2, 4, dtype=torch.complex64)}),
}


def returned(name):
    return RETURNED[name]


def talkative():
    raise RuntimeError("a state dict with many keys: " + "k\u20ac" * 100_000)


def parent_of_a_sleeper():
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
    return nn.Linear(2, 2), {"x": torch.ones(3, 2)}


def suicidal():
    os.abort()
