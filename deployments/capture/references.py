"""Reference cases: inputs drawn from the samples, answers of the eager module, and comparisons.

At least two cases of different odd rows and tokens, one of a single row, one of a single token. The
draw is seeded: the same module gives the same references.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from coissue.deployments.capture.artifact import (
    TOLERANCES,
    CaptureError,
    Reference,
    as_numbers,
    find_difference,
)  # fmt: skip
from coissue.deployments.capture.lower import to_numpy
from coissue.deployments.capture.shapes import DTYPES
from coissue.deployments.capture.sources import Axes, Source, Tensors
from coissue.kernels.interpreter import InterpretError, interpret
from coissue.kernels.ir import Program

ROWS_ONLY = ((1, 0), (3, 0))
WITH_TOKENS = ((1, 5), (3, 7), (5, 1))
#: Cases of more tokens are run, but not kept.
TOKENS_KEPT_MAX = 7


def make_cases(
    samples: Tensors, axes: Mapping[str, Axes], limits: tuple[int, int]
) -> list[Tensors]:
    """Inputs of each case; `limits` are the most rows and tokens (0: the model has none).

    The last has as many tokens as allowed, so that a model with a table of positions shows it.
    """
    sizes = (*WITH_TOKENS, (1, limits[1])) if limits[1] else ROWS_ONLY
    clipped = dict.fromkeys((min(r, limits[0]), min(t, limits[1])) for r, t in sizes)
    generator = torch.Generator().manual_seed(0)
    return [
        {name: _draw(sample, axes[name], size, generator) for name, sample in samples.items()}
        for size in clipped
    ]


def _draw(
    sample: torch.Tensor, axes: Axes, size: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    shape = (*size[: len(axes)], *sample.shape[len(axes) :])
    if sample.is_floating_point():
        values = sample.flatten()
        spread = torch.randn(len(values), generator=generator).to(sample.dtype)
        values = values if bool((values != values[0]).any()) else values + spread
        return values[torch.randint(len(values), shape, generator=generator)]
    numbers = sample.to(torch.int64)
    low, high = min(0, int(numbers.min())), int(numbers.max())
    drawn = torch.randint(low, high + 1, shape, generator=generator)
    if len(axes) == 2 and high <= 1:
        drawn[:, 0] = high  # a mask that hides every token of a row means nothing
    return drawn.to(sample.dtype)


def answer_all(source: Source, cases: list[Tensors]) -> list[Tensors]:
    """The eager answers. Raises `CaptureError` if the module fails or answers twice differently."""
    answers = []
    for case in cases:
        size = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in case.items())
        try:
            first, second = (source.run({k: v.clone() for k, v in case.items()}) for _ in range(2))
        except CaptureError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            raise CaptureError(
                f"the module fails on {size}: {type(error).__name__}: {reason[0]}"
            ) from error
        compare(first, second, f"two runs of the module on {size}")
        answers.append(first)
    return answers


def find_tolerance(program: Program) -> float:
    """That of the coarsest float dtype in the program."""
    used = {type_.dtype for type_ in program.types}
    return max((TOLERANCES[dtype] for dtype in used & TOLERANCES.keys()), default=0.0)


def compare(got: Tensors, want: Tensors, what: str) -> None:
    """Raises `CaptureError` if `what` differ by more than the coarsest dtype allows."""
    allowed = max(TOLERANCES.get(DTYPES.get(t.dtype, ""), 0.0) for t in want.values())
    story = find_difference(_arrays(got), _arrays(want), allowed)
    if story is not None:
        raise CaptureError(
            f"{what} differ: {story}; values that NumPy, Python or a random generator made "
            "while the module was captured are fixed in the program"
        )


def compare_with_interpreter(
    program: Program, weights: Mapping[str, np.ndarray], references: list[Reference]
) -> None:
    """The program's meaning must be the module's. Programs with opaque ops have none here."""
    if any(op.name == "opaque" for op in program.ops):
        return
    plain = {w.digest: as_numbers(weights[w.digest]) for w in program.weights}
    for reference in references:
        inputs = {name: as_numbers(array) for name, array in reference.inputs.items()}
        try:
            answer = interpret(program, inputs, plain)
        except InterpretError as error:
            raise CaptureError(f"the program fails where the module does not: {error}") from error
        wanted = {name: as_numbers(array) for name, array in reference.outputs.items()}
        story = find_difference(answer, wanted, find_tolerance(program))
        if story is not None:
            raise CaptureError(f"the program does not answer as the module does: {story}")


def to_reference(inputs: Tensors, outputs: Tensors) -> Reference:
    return Reference(_arrays(inputs), _arrays(outputs))


def _arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}
