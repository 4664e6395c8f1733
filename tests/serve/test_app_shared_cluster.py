"""`coissue up --address` in a cluster that another team uses, whose applications stay."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from serving import TESTS, WAIT_S, Up, find_free_port, make_settings, poll

FEW = {"mlp-a": ("mlp", {"seed": 1}), "unimportable": ("unimportable", {})}
THEIRS = {"declared": "RUNNING", "ran": "RUNNING"}


class Cluster:
    def __init__(self, folder):
        self.port = find_free_port()
        paths = [str(TESTS / "serve"), str(TESTS), os.environ.get("PYTHONPATH", "")]
        # Left alone, `ray.init` wants of others the token that it puts into the user's home.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled"}
        with (folder / "cluster.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, TESTS / "serve" / "other_team.py", str(self.port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=env, cwd=folder, start_new_session=True,
            )  # fmt: skip
        self.address = self._read()
        poll("theirs run", lambda: self.states() == THEIRS)

    def _read(self):
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                return json.loads(line)
        return pytest.fail("the other team's cluster ended")

    def states(self):
        print(file=self.process.stdin, flush=True)
        return self._read()

    def drivers(self):
        print("drivers", file=self.process.stdin, flush=True)
        return self._read()

    def stop(self):
        self.process.stdin.close()
        self.process.wait(WAIT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


def start(cluster, cache, folder, **application):
    up = Up(folder, make_settings(cache, FEW), ("--address", cluster.address))
    up.application |= application
    return up


def test_applications_of_others_stay_and_only_ours_go(cluster, cache, tmp_path):
    up = start(cluster, cache, tmp_path)
    with up:
        up.port = cluster.port  # where Serve of the cluster listens
        assert up.wait_settled()["mlp-a"] == "ready"
        poll("it says so", lambda: "Ctrl-C ends it" in up.log.read_text())
        said = up.log.read_text()
        assert f"Serve runs here with port {cluster.port}: used, not http_options.port." in said
        assert f"http://127.0.0.1:{cluster.port}/tenants/mlp-a" in said
        states = cluster.states()
        assert THEIRS.items() <= states.items()
        assert set(states) - set(THEIRS) == {"coissue", "tenant-unimportable"}
        assert up.get("/declared").body == up.get("/ran").body == b"hello"
        # A second one of the same name is refused, and the first does not notice.
        (tmp_path / "second").mkdir()
        with start(cluster, cache, tmp_path / "second") as second:
            assert second.process.wait(WAIT_S) == 1
            said = second.log.read_text().splitlines()[-1]
            assert said.startswith("applications.0.name: another `coissue up` runs an application")
        assert up.states()["mlp-a"] == "ready"
        up.interrupt()
        assert up.process.wait(WAIT_S) == 0
    assert cluster.states() == THEIRS


def test_a_route_of_others_is_refused(cluster, cache, tmp_path):
    with start(cluster, cache, tmp_path, name="mine", route_prefix="/ran") as up:
        assert up.process.wait(WAIT_S) == 1
        said = up.log.read_text().splitlines()[-1]
        assert said.startswith("applications.0.route_prefix: '/ran' belongs to application 'ran'")
    assert cluster.states() == THEIRS


def test_what_a_killed_one_left_behind_is_taken_over(cluster, cache, tmp_path):
    before = cluster.drivers()
    up = start(cluster, cache, tmp_path)
    with up:
        poll("it is deployed", lambda: "coissue" in cluster.states())
        assert cluster.drivers() > before
        os.killpg(up.process.pid, signal.SIGKILL)
        up.process.wait()
    assert "coissue" in cluster.states()
    poll("Ray notices that the driver is gone", lambda: cluster.drivers() <= before)
    (tmp_path / "again").mkdir()
    with start(cluster, cache, tmp_path / "again") as again:
        again.port = cluster.port
        assert again.wait_settled()["mlp-a"] == "ready"
    assert cluster.states() == THEIRS
