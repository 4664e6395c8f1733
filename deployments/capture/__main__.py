"""The capture process. The last line on stdout is for the caller; all else goes to stderr."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pydantic

from coissue.deployments.capture.artifact import CaptureError, CaptureJob

#: The exit status of a model that cannot be captured, whatever the reason.
REFUSED = 3


def main(job_file: str, folder: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit status and the line for the caller."""
    try:
        job = CaptureJob.model_validate_json(Path(job_file).read_text())
        # Here, not above: an environment whose torch does not import gets a sentence too.
        from coissue.deployments.capture.pipeline import capture

        artifact = capture(job.model, job.limits, job.name)
        artifact.save(Path(folder))
    except CaptureError as error:
        return REFUSED, {"error": str(error), "op": error.op, "where": error.where}
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        return REFUSED, {"error": f"{path}: {first['msg']}", "op": "", "where": ""}
    except Exception as error:
        traceback.print_exc()
        text = f"capture failed: {type(error).__name__}: {error}"
        return REFUSED, {"error": text, "op": "", "where": ""}
    program = artifact.program
    size = sum(array.nbytes for array in artifact.weights.values())
    return 0, {"name": program.name, "ops": len(program.ops), "weight_bytes": size}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m coissue.deployments.capture JOB.json FOLDER")
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    status, line = main(sys.argv[1], sys.argv[2])
    print(json.dumps(line), file=answer, flush=True)
    sys.exit(status)
