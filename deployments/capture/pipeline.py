"""Capture from end to end: source -> export -> lower -> check -> references -> `Artifact`.

Called by `__main__` in the capture process, and by tests. Every failure that is the model's doing
is a `CaptureError` with a sentence.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import Any

import torch
from torch.export import ExportedProgram

from coissue.deployments.capture import converters, converters_nn
from coissue.deployments.capture.artifact import Artifact, CaptureError
from coissue.deployments.capture.export import export
from coissue.deployments.capture.lower import is_converted, lower
from coissue.deployments.capture.references import (
    TOKENS_KEPT_MAX,
    answer_all,
    compare,
    compare_with_interpreter,
    find_tolerance,
    make_cases,
    to_reference,
)
from coissue.deployments.capture.sources import Axes, Source, Tensors, load_source
from coissue.deployments.settings import Limits, ModelSettings
from coissue.kernels.ir import Program
from coissue.kernels.spec import SpecError, check_program

#: Importing these modules fills the table of `lower`.
CONVERTERS = (converters, converters_nn)
VERSIONS = ("torch", "numpy", "coissue")


def capture(model: ModelSettings, limits: Limits, name: str = "model") -> Artifact:
    """Raises `CaptureError`."""
    # torch.export warns about its own insides; a caller that makes warnings errors must not fail.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return _capture(load_source(model), model, limits, name)


def _capture(source: Source, model: ModelSettings, limits: Limits, name: str) -> Artifact:
    exported = export(source, limits, is_converted)
    outputs = list(source.run({k: v.clone() for k, v in source.samples.items()}))
    size = (limits.rows, limits.tokens)
    program, weights = lower(exported, name, list(source.samples), outputs, size)
    try:
        check_program(program)
    except SpecError as error:
        raise CaptureError(f"the program is not legal: {error}") from error
    cases = make_cases(source.samples, _find_axes(program), (limits.rows, program.tokens_limit))
    answers = answer_all(source, cases)
    for case, answer in zip(cases, answers, strict=True):
        compare(_run_exported(exported, case, outputs), answer, "the module and its exported graph")
    kept = cases[: len(cases) - (program.tokens_limit > TOKENS_KEPT_MAX)]
    references = [to_reference(*pair) for pair in zip(kept, answers, strict=False)]
    compare_with_interpreter(program, weights, references)
    meta = {
        "source": model.model_dump(exclude_none=True),
        "limits": limits.model_dump(),
        "versions": {package: importlib.metadata.version(package) for package in VERSIONS},
        "tolerance": find_tolerance(program),
    }
    return Artifact(program, weights, tuple(references), meta)


def _find_axes(program: Program) -> dict[str, Axes]:
    """Per input, which leading dims are R and T."""
    axes = {}
    for port in program.inputs:
        shape = program.types[port.value].shape
        moving = [dim for dim in shape if not dim.is_fixed]
        if any(dim.is_fixed for dim in shape[: len(moving)]) or len(moving) > 2:
            raise CaptureError(f"input {port.name!r}: tokens must be dim 1, and no other dim")
        axes[port.name] = ("rows", "tokens")[: len(moving)]
    return axes


def _run_exported(exported: ExportedProgram, case: Tensors, names: list[str]) -> Tensors:
    """The exported graph's outputs, in the order of `names`."""
    arguments: list[Any] = [tensor.clone() for tensor in case.values()]
    flat = torch.fx.Interpreter(exported.graph_module).run(*_lifted(exported), *arguments)
    found = [leaf for leaf in flat if leaf is not None]
    return dict(zip(names, found, strict=True))


def _lifted(exported: ExportedProgram) -> list[torch.Tensor]:
    """Parameters, buffers and constants in the order of the graph's first placeholders."""
    pool = {**exported.constants, **exported.state_dict}
    targets = [s.target for s in exported.graph_signature.input_specs if s.target is not None]
    return [pool[target] for target in targets]
