"""Who may end a detached scheduler, and that an orphan ends itself: a Ray without Serve."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ray, sys, time
from coissue.deployments.actor import NotOwnerError, find_scheduler, start_scheduler
from coissue.deployments.run_dir import RunDir
from coissue.deployments.settings import AppSettings

settings = AppSettings.model_validate({
    "device": {"cache": sys.argv[1], "native_kernels": False},
    "scheduler": {"metrics_port": None, "health": {"orphan_timeout_ms": 3000}},
    "slo_classes": {"fast": {"deadline_ms": 10}},
    "tenants": [{"name": "a", "model": {"factory": "m:f"}, "slo": "fast"}],
})
ray.init(address="local", log_to_driver=False, include_dashboard=False, num_cpus=1)
folder = RunDir()
folder.write_settings(settings)
scheduler = start_scheduler(str(folder.path))
assert ray.get(scheduler.adopt.remote("first")) == str(folder.path)
assert ray.get(scheduler.adopt.remote("second")) == str(folder.path)
assert ray.get(scheduler.stop.remote("first", True)) is False
changed = settings.model_dump(mode="json")
assert ray.get(scheduler.configure.remote("second", changed, "")) == []
try:
    ray.get(scheduler.configure.remote("first", changed, ""))
    raise AssertionError("the first owner changed it")
except NotOwnerError:
    pass
for _ in range(6):  # longer than an orphan lives
    assert ray.get(scheduler.ping.remote(5.0)) > 0
    time.sleep(1)
epoch, owner, attached = ray.get(scheduler.attached.remote())
assert epoch and owner == "second" and attached == {}
heard = time.monotonic()
while find_scheduler() is not None:
    assert time.monotonic() < heard + 60
    time.sleep(0.1)
assert time.monotonic() > heard + 0.5
assert folder.remove() and not folder.path.exists()  # it let go
print("ended")
"""


def test_only_the_last_owner_stops_it_and_an_orphan_ends_itself(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=180
    )
    assert run.stdout == "ended\n", run.stderr
