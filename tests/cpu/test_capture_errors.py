"""Every refusal is a sentence with the op and the module path where they are known."""

import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import _VF, nn

from coissue.deployments.capture.architectures import ARCHITECTURES
from coissue.deployments.capture.artifact import CaptureError
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.settings import Limits, ModelSettings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
LIMITS = Limits(rows=8, tokens=32)

#: model -> (words of the sentence, op, module path)
REFUSALS = {
    "random": ("random numbers cannot be served", "aten.rand_like.default", "block"),
    "writes_buffer": ("writes to its buffer 'count'", "aten.add.Tensor", "block"),
    "writes_input": ("writes to its input 'x'", "aten.add.Tensor", ""),
    "branch_on_values": ("control flow on values", "", "block"),
    "shape_from_values": ("a shape that depends on values", "aten.index.Tensor", "block"),
    "number_from_tensor": ("a number taken out of a tensor", "aten.item.default", "block"),
    "cond": ("control flow", "cond", "block"),
    "numpy_random": ("two runs of the module", "", ""),
    "numpy_inside": (".numpy() is not supported", "", "block"),
    "counts_calls": ("two runs of the module", "", ""),
    "batch_statistics": (
        "batch norm over the statistics of the batch", "aten._native_batch_norm_legit.no_stats",
        "block.norm",
    ),
    "no_such_op": ("this op is not served", "aten._linalg_svd.default", "block"),
    "complex": ("is not served", "aten._fft_r2c.default", "block"),
    "branch_on_rows": ("Not all values of rows = dim 0 of 'x'", "", ""),
    "fixed_rows": ("specialized it to be a constant (3)", "", ""),
    "even_same": ("around a window of even size", "aten.conv1d.padding", "block.conv"),
    "one_more_token": ("a size is tokens + 1", "aten.cat.default", "block"),
    "few_positions": ("Not all values of tokens = dim 1 of 'x'", "", ""),
    "few_embeddings": ("the module fails on x [1, 32, 4]: IndexError", "", ""),
    "initial_state": ("initial state of zeros only", "coissue.lstm.default", "block.cell"),
    "packed": ("packed sequences cannot be served", "", "block"),
    "projected": ("recurrence with projections", "coissue.lstm.default", "block.cell"),
    "text_output": ("output 'b' is a str, not a tensor", "", ""),
    "no_output": ("the module returns no tensor", "", ""),
    "raises": ("no_such_method", "", "block"),
}  # fmt: skip

BROKEN = {
    "number": "must return (module, samples) or a module with sample_inputs, not int",
    "module_alone": "not Linear",
    "no_dict": "samples must be a dict",
    "one_row": "sample 'x' has shape [1, 4]; dim 0 is rows",
    "unequal_rows": "sample 'b' has another number of rows",
    "not_tensor": "sample 'x' is a list",
    "stray_dynamic": "dynamic names 'y'",
    "bad_dynamic": "dynamic['x'] must be ('rows',) or ('rows', 'tokens')",
}


def refuse(model):
    with pytest.raises(CaptureError) as caught:
        capture(model, LIMITS)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_module(name):
    words, op, where = REFUSALS[name]
    error = refuse(ModelSettings(factory="refused_models:refused", kwargs={"name": name}))
    assert words in str(error)
    assert (error.op, error.where) == (op, where)


def test_control_flow_on_values_is_named_by_its_line_where_the_module_has_no_path():
    error = refuse(ModelSettings(factory="refused_models:gate"))
    assert error.where == ""
    said = (
        r"cannot be served: 'return x if x.sum\(\) > 0 else -x', line \d+ of .*/refused_models.py"
    )
    assert re.search(said, str(error))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_factory(name):
    error = refuse(ModelSettings(factory="refused_models:returned", kwargs={"name": name}))
    assert str(error).startswith("model.factory: ")
    assert BROKEN[name] in str(error)


def test_complex_input_is_named():
    error = refuse(
        ModelSettings(factory="refused_models:returned", kwargs={"name": "complex_input"})
    )
    assert "complex64" in str(error)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("no_such_package.models:make", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("refused_models:no_such_name", "AttributeError"),
        ("refused_models:raising", "FileNotFoundError: weights.bin is missing"),
        ("refused_models:refused", "TypeError"),
    ],
)
def test_factory_that_fails(factory, words):
    error = refuse(ModelSettings(factory=factory))
    assert str(error).startswith(f"model.factory: {factory!r}: ")
    assert words in str(error)


def test_recurrences_are_restored_after_a_failed_export():
    refuse(ModelSettings(factory="refused_models:refused", kwargs={"name": "packed"}))
    assert "lstm" not in vars(_VF)
    cell = nn.LSTM(2, 2, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(1, 3, 2), [3], batch_first=True)
    assert cell(packed)[1][0].shape == (1, 1, 2)


def checkpoint(tmp_path, tensors, architecture="mlp", **kwargs):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    return ModelSettings(checkpoint=str(path), architecture=architecture, kwargs=kwargs)


def test_the_settings_know_all_architectures():
    (known, _) = get_args(ModelSettings.model_fields["architecture"].annotation)
    assert set(get_args(known)) == set(ARCHITECTURES)


def test_checkpoint_errors_name_the_tensors(tmp_path):
    good = {name: t.clone() for name, t in nn.Sequential(nn.Linear(4, 2)).state_dict().items()}
    error = refuse(checkpoint(tmp_path, {"0.weight": good["0.weight"]}, sizes=[4, 2]))
    assert str(error) == "model.checkpoint: lacks 0.bias"
    error = refuse(checkpoint(tmp_path, good | {"1.weight": torch.zeros(2)}, sizes=[4, 2]))
    assert str(error) == "model.checkpoint: has unexpected 1.weight"
    error = refuse(checkpoint(tmp_path, good | {"0.bias": torch.zeros(3)}, sizes=[4, 2]))
    assert str(error) == "model.checkpoint: 0.bias is [3], the architecture has [2]"
    with pytest.raises(ValidationError, match="Input should be 'bert', 'minilm', 'mlp' or 'res"):
        checkpoint(tmp_path, good, "vgg")
    error = refuse(checkpoint(tmp_path, good, size=[4, 2]))
    assert str(error).startswith("model.kwargs: mlp: TypeError")
    error = refuse(ModelSettings(checkpoint=str(tmp_path / "none"), architecture="mlp"))
    assert str(error).startswith("model.checkpoint: ")


def save_program(tmp_path, module, samples, dims):
    exported = torch.export.export(module, samples, dynamic_shapes=dims, strict=False)
    path = tmp_path / "program.pt2"
    torch.export.save(exported, path)
    return ModelSettings(program=str(path))


@pytest.mark.filterwarnings("ignore")
def test_saved_program_errors(tmp_path):
    linear, x = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    error = refuse(save_program(tmp_path, linear, (x,), None))
    assert str(error).startswith("input 'input' has a fixed number of rows in dim 0: export it w")
    one, two = torch.export.Dim("one", min=1), torch.export.Dim("two", min=1)

    class Apart(nn.Module):
        def forward(self, a, b):
            return a.sum(1), b.sum(1)

    error = refuse(save_program(tmp_path, Apart(), (x, x[:2]), ({0: one}, {0: two})))
    assert "input 'b': dim 0 must be the same number of rows in every input" in str(error)
    training = nn.BatchNorm1d(4).train()
    error = refuse(save_program(tmp_path, training, (x,), ({0: one},)))
    assert "writes to its buffer" in str(error)
    error = refuse(ModelSettings(program=str(tmp_path / "none.pt2")))
    assert str(error).startswith("model.program: ")
