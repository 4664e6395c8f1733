"""What capture leaves behind, as data: program, weights by digest, reference answers. No torch.

Written by the capture process, read by Control and the scheduler actor (attach). A folder:

    program.msgpack          `ir.encode_program`
    weights.safetensors      key = digest
    references.safetensors   keys `in.<case>.<input>` and `out.<case>.<output>`
    meta.json                source, limits, inputs, versions, tolerance; written last: without it,
                             not an artifact

NumPy has no bf16: such arrays hold the bits as uint16, a dtype the IR does not have, so that the
two cannot be mistaken for each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from coissue.deployments.settings import Limits, ModelSettings, Settings
from coissue.kernels import interpreter
from coissue.kernels.ir import Program, Type, Weight, decode_program, encode_program

#: IR dtype -> NumPy dtype of the arrays that hold it.
NUMPY_DTYPES = {**interpreter.NUMPY_DTYPES, "bf16": np.dtype(np.uint16)}
#: IR dtype -> allowed relative error of an answer; the same, times the answer's scale, absolutely.
TOLERANCES = {"f16": 1e-2, "bf16": 4e-2, "f32": 2e-4, "f64": 1e-9}


#: What reading a folder raises that capture did not write, or not to the end.
UNREADABLE = (
    OSError, LookupError, TypeError, ValueError, msgspec.MsgspecError, SafetensorError,
)  # fmt: skip


class CaptureError(Exception):
    """A model that cannot be captured: a sentence for the tenant team, op and module if known."""

    def __init__(self, message: str, *, op: str = "", where: str = "") -> None:
        super().__init__(message)
        self.op, self.where = op, where

    def __str__(self) -> str:
        spots = [f"op {self.op}"] if self.op else []
        spots += [f"in module {self.where!r}"] if self.where else []
        return str(self.args[0]) + (f" ({', '.join(spots)})" if spots else "")


class CaptureJob(Settings):
    """The content of the JSON file that the capture process reads."""

    name: str = "model"
    model: ModelSettings
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Reference:
    """One case: inputs by name and what the eager module answers."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Artifact:
    program: Program
    #: Digest -> array; every digest of the program and no other.
    weights: dict[str, np.ndarray]
    #: At least two, of different rows (and tokens).
    references: tuple[Reference, ...]
    #: JSON: `source`, `limits`, `versions`, `tolerance`; from the capture process also `inputs`.
    meta: dict[str, Any]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "program.msgpack").write_bytes(encode_program(self.program))
        save_file(self.weights, folder / "weights.safetensors")
        arrays: dict[str, np.ndarray] = {}
        for case, reference in enumerate(self.references):
            arrays |= {f"in.{case}.{name}": array for name, array in reference.inputs.items()}
            arrays |= {f"out.{case}.{name}": array for name, array in reference.outputs.items()}
        save_file(arrays, folder / "references.safetensors")
        (folder / "meta.json").write_text(json.dumps(self.meta, indent=1, sort_keys=True))

    @classmethod
    def load(cls, folder: Path, held: Callable[[Weight, Type], bool] | None = None) -> Artifact:
        """Without the weights that the caller says it holds: they are neither read nor checked.

        Raises `CaptureError` on a folder that is not a finished, unchanged artifact.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text())
            program = decode_program((folder / "program.msgpack").read_bytes())
            check_values(program)
            wanted = {
                weight.digest: weight
                for weight in program.weights
                if held is None or not held(weight, program.types[weight.value])
            }
            with safe_open(folder / "weights.safetensors", framework="np") as file:
                present = wanted.keys() & set(file.keys())
                weights = {digest: file.get_tensor(digest) for digest in present}
            check_weights(program, weights, wanted.values())
            references = _group_references(load_file(folder / "references.safetensors"))
            float(meta["tolerance"])
        except UNREADABLE as error:
            raise CaptureError(f"{folder} is not a finished artifact: {error}") from error
        return cls(program, weights, references, meta)


def _group_references(arrays: dict[str, np.ndarray]) -> tuple[Reference, ...]:
    cases: dict[int, Reference] = {}
    for key in sorted(arrays):
        side, case, name = key.split(".", 2)
        reference = cases.setdefault(int(case), Reference({}, {}))
        (reference.inputs if side == "in" else reference.outputs)[name] = arrays[key]
    return tuple(cases[case] for case in sorted(cases))


def compute_digest(array: np.ndarray, dtype: str) -> str:
    """SHA-256 of IR dtype, shape and little-endian bytes, in hex."""
    digest = hashlib.sha256(f"{dtype}{list(array.shape)}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_values(program: Program) -> None:
    """Weights name values of the program, so that they can be looked up. Raises `ValueError`."""
    for weight in program.weights:
        if not 0 <= weight.value < len(program.types):
            raise ValueError(f"weight {weight.name!r} is value {weight.value}, which is not there")


def check_weights(
    program: Program, weights: Mapping[str, np.ndarray], wanted: Iterable[Weight]
) -> None:
    """Each of `wanted` is there with its dtype, shape and content."""
    for weight in wanted:
        array, kind = weights.get(weight.digest), program.types[weight.value]
        if array is None:
            raise CaptureError(f"weight {weight.name!r} is missing from the artifact")
        if array.dtype != NUMPY_DTYPES[kind.dtype] or array.shape != kind.at(1, 1):
            raise CaptureError(f"weight {weight.name!r} is not the {kind.dtype} of the program")
        if compute_digest(array, kind.dtype) != weight.digest:
            raise CaptureError(f"weight {weight.name!r} does not have the content of its digest")


def find_difference(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float
) -> str | None:
    """None if equal within `tolerance`, else a sentence: which output, where, by how much."""
    for name, expected in want.items():
        actual = got.get(name)
        if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
            form = "nothing" if actual is None else f"{actual.dtype}{list(actual.shape)}"
            return f"output {name!r} is {form} instead of {expected.dtype}{list(expected.shape)}"
        left, right = (as_numbers(x).astype(np.float64) for x in (actual, expected))
        finite = np.abs(right[np.isfinite(right)])
        allowed = tolerance * (np.abs(right) + max(1e-3, float(finite.max(initial=0.0))))
        wrong = ~(np.isclose(left, right, rtol=0, atol=0, equal_nan=True))
        with np.errstate(invalid="ignore"):
            wrong &= ~(np.abs(left - right) <= allowed)
        if wrong.any():
            at = tuple(int(index) for index in np.argwhere(wrong)[0])
            return (
                f"output {name!r} differs in {int(wrong.sum())} of {wrong.size} elements, "
                f"first at {list(at)}: {left[at]:g} instead of {right[at]:g}"
            )
    return None


def as_numbers(array: np.ndarray) -> np.ndarray:
    """The array itself, or bf16 bits as f32: what the interpreter takes."""
    if array.dtype != np.uint16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
