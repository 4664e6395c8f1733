"""Where a module comes from: a factory, a saved `torch.export` program, or a checkpoint.

A factory, `pkg.mod:callable`, is called with the settings' `kwargs` and returns one of

    module                         with the attribute `sample_inputs` (and, if wanted, `dynamic`)
    (module, samples)
    (module, samples, dynamic)

`samples` is a dict: input name -> tensor, with rows in dim 0 (at least 2) and tokens in dim 1 of
sequence inputs. The names are those of the model endpoint; if all of them are parameters of
`forward` they are passed by name, else in order. Values matter twice: integers are later drawn from
0 to the sample's largest, floats from the sample's values.

`dynamic` is a dict: input name -> what its leading dims are, ("rows",) or ("rows", "tokens").
Inputs left out have rows, and tokens too if they are two-dimensional integers named `input_ids`,
`attention_mask`, `token_type_ids` or `position_ids`. Every other dim is fixed by the sample.

The module answers with a tensor, a tuple or a dict; outputs are named by the dict's keys, else
`output`, `output_1`, ... It is put into eval mode. A checkpoint with an architecture is the same
with a factory of ours (see `architectures`). A saved program brings its own samples and dynamic
dims: dim 0 of each input must share one `torch.export.Dim`, with a minimum of 1.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from coissue.deployments.capture import architectures
from coissue.deployments.capture.artifact import CaptureError
from coissue.deployments.settings import ModelSettings

Tensors = dict[str, torch.Tensor]
Axes = tuple[str, ...]
TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
DYNAMIC_FORMS: tuple[Axes, ...] = (("rows",), ("rows", "tokens"))


@dataclass(frozen=True, slots=True)
class Source:
    """A module ready to be exported, or an exported program."""

    #: Called with the inputs in order; answers with a dict of tensors. None for a saved program.
    module: Flat | None
    exported: ExportedProgram | None
    samples: Tensors
    #: Per input. Empty for a saved program, whose symbols say it.
    dynamic: dict[str, Axes]
    #: The eager answer, by output name.
    run: Callable[[Tensors], Tensors]


class Flat(torch.nn.Module):
    """The tenant's module with inputs in a fixed order and outputs as a flat dict."""

    def __init__(self, inner: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.inner, self.names = inner, names
        parameters = inspect.signature(inner.forward).parameters
        self.by_name = all(name in parameters for name in names)

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        if self.by_name:
            return flatten_outputs(self.inner(**dict(zip(self.names, tensors, strict=True))))
        return flatten_outputs(self.inner(*tensors))


def flatten_outputs(answer: Any) -> Tensors:
    """Outputs by name: dict keys, joined by dots where nested; "output", "output_1" for others."""
    flat: Tensors = {}
    for path, leaf in pytree.tree_flatten_with_path(_as_plain(answer))[0]:
        keys = [entry.key for entry in path if isinstance(entry, pytree.MappingKey)]
        places = [entry.idx for entry in path if isinstance(entry, pytree.SequenceKey)]
        stem = ".".join(str(key) for key in keys) or "output"
        name = "_".join([stem, *(str(place) for place in places if place or len(places) > 1)])
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(f"output {name!r} is a {type(leaf).__name__}, not a tensor")
        flat[name] = leaf
    if not flat:
        raise CaptureError("the module returns no tensor")
    return flat


def _as_plain(answer: Any) -> Any:
    """Dicts, tuples and lists of any class (such as those of transformers) as built-in ones."""
    if isinstance(answer, Mapping):
        return {key: _as_plain(value) for key, value in answer.items()}
    if isinstance(answer, tuple | list):
        return tuple(_as_plain(value) for value in answer)
    return answer


def load_source(model: ModelSettings) -> Source:
    """Runs the tenant's factory, or reads the file that `model` names. Raises `CaptureError`."""
    if model.program is not None:
        return _load_program(model.program)
    if model.checkpoint is not None:
        made = architectures.build(str(model.architecture), model.checkpoint, model.kwargs)
    else:
        made = _call_factory(str(model.factory), model.kwargs)
    module, samples, dynamic = _unpack(made)
    axes = {name: _find_axes(name, samples[name], dynamic) for name in samples}
    flat = Flat(module.eval(), list(samples)).eval()
    return Source(flat, None, samples, axes, lambda inputs: flat(*inputs.values()))


def _call_factory(path: str, kwargs: dict[str, Any]) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        return factory(**kwargs)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"model.factory: {path!r}: {type(error).__name__}: {error}") from error


def _unpack(made: Any) -> tuple[torch.nn.Module, Tensors, dict[str, Axes]]:
    parts = made if isinstance(made, tuple) else (made, *_read_attributes(made))
    if not 2 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        what = [type(part).__name__ for part in parts]
        raise CaptureError(
            "model.factory: must return (module, samples) or a module with sample_inputs, "
            f"not {what[0] if len(what) == 1 else '(' + ', '.join(what) + ')'}"
        )
    samples, dynamic = parts[1], parts[2] if len(parts) == 3 else {}
    if not isinstance(samples, Mapping) or not samples:
        raise CaptureError("model.factory: samples must be a dict of input name to tensor")
    for name in dynamic:
        if name not in samples:
            raise CaptureError(f"model.factory: dynamic names {name!r}, which is not in samples")
    _check_samples(dict(samples))
    return parts[0], {name: t.detach() for name, t in samples.items()}, dict(dynamic)


def _read_attributes(module: Any) -> tuple[Any, ...]:
    if not hasattr(module, "sample_inputs"):
        return ()
    return module.sample_inputs, getattr(module, "dynamic", {})


def _check_samples(samples: dict[str, Any]) -> None:
    for name, tensor in samples.items():
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(f"model.factory: sample {name!r} is a {type(tensor).__name__}")
        if tensor.ndim == 0 or tensor.shape[0] < 2:
            raise CaptureError(
                f"model.factory: sample {name!r} has shape {list(tensor.shape)}; "
                "dim 0 is rows, and at least 2 of them are needed"
            )
        if tensor.shape[0] != next(iter(samples.values())).shape[0]:
            raise CaptureError(f"model.factory: sample {name!r} has another number of rows")


def _find_axes(name: str, sample: torch.Tensor, dynamic: dict[str, Axes]) -> Axes:
    if name not in dynamic:
        is_integer = not (sample.is_floating_point() or sample.is_complex())
        return DYNAMIC_FORMS[sample.ndim == 2 and is_integer and name in TOKEN_INPUTS]
    axes = tuple(dynamic[name])
    if axes not in DYNAMIC_FORMS or len(axes) > sample.ndim:
        raise CaptureError(
            f"model.factory: dynamic[{name!r}] must be ('rows',) or ('rows', 'tokens'), not {axes}"
        )
    if len(axes) == 2 and sample.shape[1] < 2:
        raise CaptureError(f"model.factory: sample {name!r} needs at least 2 tokens in dim 1")
    return axes


def _load_program(path: str) -> Source:
    try:
        exported = torch.export.load(path)
    except Exception as error:
        said = f"not read as saved by torch.export.save: {type(error).__name__}: {error}"
        raise CaptureError(f"model.program: {path!r}: {said}") from error
    if exported.example_inputs is None:
        raise CaptureError("model.program: saved without example inputs")
    leaves, spec = pytree.tree_flatten(exported.example_inputs)
    names = list(exported.graph_signature.user_inputs)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or len(names) != len(leaves):
        raise CaptureError("model.program: every input must be a tensor")
    module = exported.module()

    def run(inputs: Tensors) -> Tensors:
        args, kwargs = pytree.tree_unflatten(list(inputs.values()), spec)
        return flatten_outputs(module(*args, **kwargs))

    return Source(None, exported, dict(zip(names, leaves, strict=True)), {}, run)
