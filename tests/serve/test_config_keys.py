"""The keys that `coissue validate` knows are those of the Ray that is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coissue.deployments import config_file

#: Our level -> Ray's.
LEVELS = {
    "ServeConfig": "ServeDeploySchema",
    "HttpOptions": "HTTPOptionsSchema",
    "GrpcOptions": "gRPCOptionsSchema",
    "Application": "ServeApplicationSchema",
    "Deployment": "DeploymentSchema",
    "LoggingOptions": "LoggingConfig",
}
#: Keys that Ray lists but refuses (host and port belong to `http_options`).
REFUSED = {"Application": {"host", "port"}}


@pytest.fixture(scope="module")
def keys_of_ray():
    """Read in a process of its own: importing Ray warns, which tests here treat as an error."""
    code = (
        "import json; from ray.runtime_env import RuntimeEnv; from ray.serve import schema; "
        f"keys = {{n: list(getattr(schema, n).model_fields) for n in {list(LEVELS.values())}}}; "
        "print(json.dumps(keys | {'RuntimeEnv': list(RuntimeEnv.known_fields)}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("level", LEVELS)
def test_keys_are_those_of_ray(keys_of_ray, level):
    known = set(getattr(config_file, level).model_fields)
    assert known == set(keys_of_ray[LEVELS[level]]) - REFUSED.get(level, set())


def test_keys_of_a_runtime_env_are_those_of_ray(keys_of_ray):
    """But for those that begin with an underscore, which are Ray's own."""
    known = set(config_file.RuntimeEnv.model_fields)
    assert known == {key for key in keys_of_ray["RuntimeEnv"] if not key.startswith("_")}
