"""Memory that tensors gave back stays in the process."""

from __future__ import annotations

import subprocess
import sys

from needs import lacks

#: Two tensors of 8 MiB a turn, as a launch of 8,192 rows of 256 numbers; page faults of 50 turns.
LAUNCHES = """
import resource, torch
from coissue.kernels.cpu.allocator import keep_freed_memory
if not keep_freed_memory():
    raise SystemExit("no glibc")

def launch():
    given, made = torch.ones(8192, 256), torch.empty(8192, 256)
    made.copy_(given)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(30):
    launch()
before = faults()
for _ in range(50):
    launch()
print(faults() - before)
"""


def test_a_launch_finds_the_memory_of_the_last_one():
    done = subprocess.run([sys.executable, "-c", LAUNCHES], capture_output=True, text=True)
    if done.stderr.startswith("no glibc"):
        lacks("glibc", "the C library is not glibc, whose limits are set here")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4096, "one turn on fresh pages; without it, 50 of them"
