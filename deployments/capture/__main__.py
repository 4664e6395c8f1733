"""The capture process: one job, or a server that forks a child for each.

    python -m coissue.deployments.capture JOB.json FOLDER
    python -m coissue.deployments.capture --serve

One job: the last line on stdout is for the caller, all else goes to stderr. As a server it imports
torch and its exporter once (seconds), then reads lines {"job": ..., "folder": ..., "seconds": ...}
and answers each with a line {"folder": ..., "status": ..., "error": ... if refused}, in the order
they end. Each job has a supervisor, whose child alone runs the tenant's code: one tenant can
neither see nor break another's capture. It ends with its input or a SIGTERM, and so do its jobs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from pydantic import ValidationError

from coissue.deployments.capture.artifact import CaptureError, CaptureJob
from coissue.deployments.capture.inputs import OpenedFiles, find_inputs
from coissue.deployments.supervise import adopt_orphans, die_with, end_children, supervise

#: A child of the server that takes longer is ended, unless the job says otherwise.
SECONDS_MAX = 600
#: The exit status of a model that cannot be captured, whatever the reason.
REFUSED: Final = 3
#: Of a sentence that the server passes on; escaped as JSON, it stays below PIPE_BUF.
ERROR_CHARS_MAX: Final = 550


def main(job_file: str, folder: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit status and the line for the caller."""
    try:
        job = read_job(Path(job_file))
        # Here, not above: an environment whose torch does not import gets a sentence too.
        from coissue.deployments.capture.pipeline import capture

        opened = OpenedFiles()
        artifact = capture(job.model, job.limits, job.name)
        artifact.meta["inputs"] = find_inputs(job.model, opened.paths - {job_file})
        artifact.save(Path(folder))
    except CaptureError as error:
        return REFUSED, {"error": str(error), "op": error.op, "where": error.where}
    except Exception as error:
        traceback.print_exc()
        text = f"capture failed: {type(error).__name__}: {error}"
        return REFUSED, {"error": text, "op": "", "where": ""}
    program = artifact.program
    size = sum(array.nbytes for array in artifact.weights.values())
    return 0, {"name": program.name, "ops": len(program.ops), "weight_bytes": size}


#: Captures come after whatever serves on this machine.
NICENESS: Final = 10


def preload() -> None:
    """What every capture imports and warms up anyway. None of it starts a thread."""
    import torch

    importlib.import_module("coissue.deployments.capture.pipeline")
    module, rows = torch.nn.Linear(2, 2), torch.export.Dim("rows")
    torch.export.export(
        module, (torch.ones(2, 2),), dynamic_shapes=({0: rows},), strict=False
    ).run_decompositions({})
    if importlib.util.find_spec("transformers"):
        importlib.import_module("transformers.modeling_utils")


def serve(lines: TextIO, answers: int) -> None:
    """Until `lines` end. `answers` is the descriptor for the caller."""
    adopt_orphans()
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, _end)
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are nobody's to wait for
    own = os.getpid()
    for line in lines:
        job = json.loads(line)
        if os.fork() == 0:
            die_with(own)
            work_on(job, answers)
    _end()


def work_on(job: dict[str, Any], answers: int) -> NoReturn:
    """The supervisor of a job: tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    adopt_orphans()

    def work() -> dict[str, Any]:
        os.close(answers)
        status, line = main(job["job"], job["folder"])
        return {"status": status, "error": line.get("error")}

    told = Path(job["folder"] + ".answer")
    line, why = supervise(work, told, job.get("seconds", SECONDS_MAX))
    error = line.get("error") if line else f"capture {why}"
    if error and len(error) > ERROR_CHARS_MAX:
        error = error[:ERROR_CHARS_MAX] + " ..."
    answer = {"folder": job["folder"], "status": line.get("status", REFUSED)}
    # One write of less than PIPE_BUF: lines of several supervisors do not mix.
    os.write(answers, json.dumps(answer | ({"error": error} if error else {})).encode() + b"\n")
    os._exit(0)


def _end(*_: object) -> NoReturn:
    end_children()
    os._exit(0)


def read_job(path: Path) -> CaptureJob:
    try:
        return CaptureJob.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise CaptureError("taken back before it began") from None
    except ValidationError as error:
        first = error.errors()[0]
        keys = ".".join(str(part) for part in first["loc"])
        raise CaptureError(f"{keys}: {first['msg']}") from error


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 2 and sys.argv[1] != "--serve"):
        sys.exit("usage: python -m coissue.deployments.capture JOB.json FOLDER | --serve")
    answer = os.dup(1)
    os.dup2(2, 1)
    if sys.argv[1] == "--serve":
        serve(sys.stdin, answer)
    else:
        code, line = main(sys.argv[1], sys.argv[2])
        os.write(answer, json.dumps(line).encode() + b"\n")
        sys.exit(code)
