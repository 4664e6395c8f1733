"""The capture process: one job, or a server that forks a child for each.

    python -m coissue.deployments.capture JOB.json FOLDER
    python -m coissue.deployments.capture --serve

One job: the last line on stdout is for the caller, all else goes to stderr. As a server it imports
torch and its exporter once (seconds), then reads lines {"job": ..., "folder": ...} and answers each
with a line {"folder": ..., "status": ..., "error": ... if refused}, in the order they end. A
tenant's code runs in the child only, so one tenant can neither see nor break another's capture.
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
from typing import Any, TextIO

from pydantic import ValidationError

from coissue.deployments.capture.artifact import CaptureError, CaptureJob
from coissue.deployments.capture.inputs import OpenedFiles, find_inputs

#: The exit status of a model that cannot be captured, whatever the reason.
REFUSED = 3
#: Of a sentence that the server passes on; escaped as JSON, it stays below PIPE_BUF.
ERROR_CHARS_MAX = 550
#: A child of the server that takes longer is ended.
SECONDS_MAX = 600


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
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are nobody's to wait for
    for line in lines:
        job = json.loads(line)
        if os.fork() == 0:
            supervise(job["job"], job["folder"], answers)
    if os.getpgrp() == os.getpid():  # the caller is gone: so are its jobs
        os.killpg(0, signal.SIGKILL)


def read_job(path: Path) -> CaptureJob:
    try:
        return CaptureJob.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        keys = ".".join(str(part) for part in first["loc"])
        raise CaptureError(f"{keys}: {first['msg']}") from error


def supervise(job_file: str, folder: str, answers: int) -> None:
    """In a child: runs the job in a child of its own and tells how it ended, whatever it does.

    The answer comes by file and the end by `waitpid`, so that nothing the tenant's code leaves
    running (it inherits every descriptor) can hold it back.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = Path(folder + ".answer")
    child = os.fork()
    if child == 0:
        os.close(answers)
        signal.alarm(SECONDS_MAX)
        status, line = main(job_file, folder)
        told.write_text(json.dumps({**line, "status": status}))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        line = json.loads(told.read_text())
    except (OSError, ValueError):
        why = f"took longer than {SECONDS_MAX} s" if code == -signal.SIGALRM else f"ended: {code}"
        line = {"error": f"capture {why}", "status": REFUSED}
    if len(line.get("error", "")) > ERROR_CHARS_MAX:
        line["error"] = line["error"][:ERROR_CHARS_MAX] + " ..."
    # One write of less than PIPE_BUF: lines of several supervisors do not mix.
    line = {key: line[key] for key in ("error", "status") if key in line} | {"folder": folder}
    os.write(answers, json.dumps(line).encode() + b"\n")
    os._exit(0)


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
