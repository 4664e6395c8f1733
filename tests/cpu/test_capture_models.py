"""Every model family, captured: the numpy interpreter answers as the eager module does.

`capture` itself compares them on its references; here on sizes it never drew, from the outside.
"""

import functools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from coissue.deployments.capture.artifact import as_numbers, find_difference
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.capture.sources import load_source
from coissue.deployments.settings import Limits, ModelSettings
from coissue.kernels.interpreter import interpret
from coissue.kernels.ir import Dim, R, T

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
LIMITS = Limits(rows=16, tokens=32)

#: name -> factory kwargs, and ops that must be in the program (how often).
MODELS = {
    "mlp": ({}, {"linear": 2, "gelu": 1, "layer_norm": 1}),
    "resnet": ({}, {"conv": 12, "batch_norm": 12, "max_pool": 1}),
    "mobilenet": ({}, {"conv": 52, "batch_norm": 52}),
    "gpt2": ({}, {"linear": 5, "attention": 1}),
    "bert": ({}, {"linear": 7, "attention": 1, "layer_norm": 3, "embedding": 3}),
    "bert_without_mask": ({}, {"linear": 6, "attention": 1}),
    "torch_encoder": ({}, {"attention": 1}),
    "tokens_first": ({}, {"lstm": 1, "permute": 1, "select": 1}),
    "dlrm": ({}, {"embedding_bag": 3, "index": 1, "matmul": 1}),
    "bag_of_words": ({}, {"embedding_bag": 1}),
    "by_hand": ({}, {"matmul": 2, "softmax": 1}),
    "halves": ({}, {"concat": 1, "slice": 2}),
    "cells": ({}, {"group_norm": 1}),
    "instances": ({}, {"group_norm": 1}),
    "instances_affine": ({"affine": True}, {"group_norm": 1}),
    "instances_running": ({"running": True}, {"batch_norm": 1}),
    "signal": ({}, {"conv": 2, "adaptive_avg_pool": 1}),
    "lstm": ({"kind": "LSTM", "num_layers": 2, "bidirectional": True}, {"lstm": 1}),
    "gru": ({"kind": "GRU", "bias": False}, {"gru": 1}),
    "rnn": ({"kind": "RNN", "nonlinearity": "relu"}, {"rnn": 1}),
}
FACTORIES = {"lstm": "recurrent", "gru": "recurrent", "rnn": "recurrent"}
FACTORIES |= {"instances_affine": "instances", "instances_running": "instances"}
SIZES = ((1, 1), (2, 9), (4, 6))


def settings(name, **kwargs):
    return ModelSettings(factory=f"captured_models:{FACTORIES.get(name, name)}", kwargs=kwargs)


@functools.cache
def captured(name):
    return capture(settings(name, **MODELS.get(name, ({},))[0]), LIMITS, name)


def draw(sample, axes, rows, tokens):
    """Fresh values of another size; integers inside the sample's range."""
    shape = ((rows, tokens)[: len(axes)]) + tuple(sample.shape[len(axes) :])
    if sample.is_floating_point():
        return torch.randn(shape).to(sample.dtype)
    return torch.randint(0, int(sample.max()) + 1, shape, dtype=sample.dtype)


def draw_inputs(name):
    """`draw(rows, tokens, seed)` gives a model's inputs, as arrays by name."""
    source = load_source(settings(name, **MODELS[name][0]))

    def drawn(rows, tokens, seed):
        torch.manual_seed(seed)
        found = {
            key: draw(sample, source.dynamic[key], rows, tokens)
            for key, sample in source.samples.items()
        }
        if "attention_mask" in found:
            found["attention_mask"][:, 0] = 1
        return {key: tensor.numpy() for key, tensor in found.items()}

    return drawn


def compare_at(artifact, source, rows, tokens):
    torch.manual_seed(rows * 100 + tokens)
    inputs = {
        name: draw(sample, source.dynamic[name], rows, tokens)
        for name, sample in source.samples.items()
    }
    if "attention_mask" in inputs:
        inputs["attention_mask"][:, 0] = 1
    with torch.no_grad():
        want = {name: tensor.numpy() for name, tensor in source.run(inputs).items()}
    got = interpret(artifact.program, {k: v.numpy() for k, v in inputs.items()}, artifact.weights)
    assert set(got) == set(want)
    assert find_difference(got, want, 2e-4) is None


@pytest.mark.parametrize("name", MODELS)
def test_interpreter_answers_like_the_module(name):
    kwargs, ops = MODELS[name]
    artifact = captured(name)
    counted = Counter(op.name for op in artifact.program.ops)
    assert {op: counted[op] for op in ops} == ops
    source = load_source(settings(name, **kwargs))
    for rows, tokens in SIZES if artifact.program.tokens_limit else SIZES[1:2]:
        compare_at(artifact, source, rows, tokens)


def test_minilm_with_real_weights():
    artifact = captured("minilm")  # compares with the module, as every capture does
    counted = Counter(op.name for op in artifact.program.ops)
    assert counted["attention"] == 6
    assert counted["linear"] == 37
    assert sum(array.nbytes for array in artifact.weights.values()) > 80_000_000


def test_bf16_weights_are_kept_as_bits():
    artifact = captured("mlp_bf16")
    assert {array.dtype for array in artifact.weights.values()} == {np.dtype(np.uint16)}
    assert {artifact.program.types[w.value].dtype for w in artifact.program.weights} == {"bf16"}
    bits = np.array([0x3F80, 0xC000], np.uint16)
    assert as_numbers(bits).tolist() == [1.0, -2.0]


def test_opaque_op_of_the_allow_list():
    artifact = captured("top_two")
    (op,) = [op for op in artifact.program.ops if op.name == "opaque"]
    assert op.attrs["target"] == "aten.topk.default"
    assert op.attrs["args"] == '[[{"input": 0}, 2, 1], {}]'
    reference = artifact.references[1]
    assert np.array_equal(
        reference.outputs["output"], -np.sort(-reference.inputs["x"], axis=1)[:, :2]
    )


def test_names_types_and_places():
    artifact = captured("by_hand")
    program = artifact.program
    assert (program.name, program.rows_limit, program.tokens_limit) == ("by_hand", 16, 32)
    assert [port.name for port in program.inputs] == ["x"]
    assert [port.name for port in program.outputs] == ["mixed", "more", "more_1"]
    assert program.types[program.inputs[0].value].shape == (R, T, Dim(8))
    assert {weight.name for weight in program.weights} == {
        "qkv.weight", "qkv.bias", "unsaved", "plain",
    }  # fmt: skip
    (linear,) = [op for op in program.ops if op.name == "linear"]
    assert linear.where == "qkv"


def test_values_are_numbered_inputs_weights_ops():
    program = captured("mlp").program
    order = [port.value for port in (*program.inputs, *program.weights)]
    order += [value for op in program.ops for value in op.outputs]
    assert order == list(range(len(program.types)))


def test_a_model_without_tokens_has_no_tokens_limit():
    assert captured("mlp").program.tokens_limit == 0


def test_references_are_odd_different_and_inside_the_sample():
    artifact = captured("bert")
    shapes = [reference.inputs["input_ids"].shape for reference in artifact.references]
    assert shapes == [(1, 5), (3, 7), (5, 1)]
    source = load_source(settings("bert"))
    for reference in artifact.references:
        ids, mask = reference.inputs["input_ids"], reference.inputs["attention_mask"]
        assert ids.min() >= 0
        assert ids.max() <= int(source.samples["input_ids"].max())
        assert (mask[:, 0] == 1).all()
    flat = np.concatenate([r.inputs["attention_mask"].ravel() for r in artifact.references])
    assert set(flat) == {0, 1}


def test_positions_over_the_default_arange_are_seen_to_be_true():
    """GPT-2 asks whether its positions count up; that they do is known without running it."""
    program = captured("gpt2").program
    fulls = [op for op in program.ops if op.name == "full"]
    assert [op.attrs["value"] for op in fulls] == [1]
    assert "clamp" not in {op.name for op in program.ops}
