"""`coissue explain`: one model end to end, in words, as a picture, as sources; and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import test_host
import torch
from typer.testing import CliRunner

from coissue.deployments.cli.main import app
from coissue.deployments.config_file import IMPORT_PATH

MODELS = {"norms": ("norms", {"width": 48}), "broken": ("no_such_factory", {})}


@pytest.fixture(scope="module", autouse=True)
def _factories_are_found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    args = test_host.make_settings(folder, MODELS).model_dump(mode="json")
    path = folder / "serve.yaml"
    path.write_text(json.dumps({"applications": [{"import_path": IMPORT_PATH, "args": args}]}))
    return path


def explain(*words):
    return CliRunner().invoke(app, ["explain", *map(str, words)])


@pytest.fixture(scope="module")
def norms(config):
    """What is said of that tenant with its sources; its picture is beside the config."""
    run = explain(config, "norms", "--source", "--svg", config.parent / "graph.svg")
    assert run.exit_code == 0, run.output
    return run.stdout


def test_the_runs_of_a_model_in_words_with_sources_and_a_picture(config, norms):
    head, before, inside, after = norms.split("\n== kernel")
    # Before the product, which takes GELU, product and sum along, and behind it.
    assert "ops of rows: layer_norm, softmax\n" in before
    assert "ops of rows: layer_norm\n" in after
    assert head.strip().endswith("6 memory-bound ops, 3 stitched")
    assert "ops of rows: gelu, mul, add\n" in inside
    assert "unfused, 1 stitched" in before
    assert "shared: " in before
    assert "not stitched, for the library: linear" in after
    assert norms.count('extern "C"') == 3
    picture = ElementTree.parse(config.parent / "graph.svg").getroot()
    boxes = [e for e in picture.iter() if e.tag.endswith("}rect")]
    assert len(boxes) > 10


def test_a_factory_a_saved_program_and_the_only_tenant_of_a_config(config, norms, tmp_path):
    run = explain("tiny_models:norms")
    assert run.exit_code == 0
    assert run.stdout.count("== kernel") == norms.count("== kernel")
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softmax(-1)).eval()
    rows = {0: torch.export.Dim("rows", max=1024)}
    program = torch.export.export(module, (torch.randn(3, 4),), dynamic_shapes=(rows,))
    torch.export.save(program, tmp_path / "saved.pt2")
    run = explain(tmp_path / "saved.pt2")
    assert run.exit_code == 0
    assert "ops of rows: softmax" in run.stdout
    one = json.loads(config.read_text())
    del one["applications"][0]["args"]["tenants"][1]
    (tmp_path / "one.yaml").write_text(json.dumps(one))
    assert explain(tmp_path / "one.yaml", "--source").stdout == norms
    assert "TENANT: missing, one of: norms, broken" in explain(config).output


def test_ops_are_timed_for_a_while_and_what_is_known_is_kept(config, tmp_path):
    """A second is enough for one op at least, whatever else the machine does."""
    own = json.loads(config.read_text())
    own["applications"][0]["args"]["device"]["cache"] = str(tmp_path / "cache")
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    run = explain(tmp_path / "own.yaml", "norms", "--tune", "1")
    assert run.exit_code == 0
    assert int(run.stderr.strip().split(" ops timed")[0].rpartition("\n")[2]) > 0
    (left,) = (tmp_path / "cache" / "native").iterdir()
    assert left.name.startswith("times-")
    assert json.loads(left.read_text())["times"]
    assert "cpu only" in explain(config, "norms", "--tune", "1", "--device", "cuda").stderr


def test_the_other_device(config):
    run = explain(config, "norms", "--device", "cuda", "--source")
    assert run.exit_code == 0
    assert "256 threads per unit" in run.stdout
    assert "__global__" in run.stdout
    assert "units are packed" not in run.stdout


def test_launches_of_many_units(config):
    run = explain(config, "norms", "--device", "cuda", "--units", "4096")
    assert run.exit_code == 0
    assert "units are packed: 4 units of a launch are one below" in run.stdout
    assert "--device cuda only" in explain(config, "norms", "--units", "2").stderr


@pytest.mark.parametrize(
    ("tenant", "words"),
    [("none", ["TENANT: 'none', one of: norms, broken"]), ("broken", ["no_such_factory"])],
)
def test_mistakes_are_one_line(config, tenant, words):
    run = explain(config, tenant)
    assert run.exit_code == 1
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"{config}: ")
    assert all(word in line for word in words)


def test_a_picture_that_cannot_be_written(config, tmp_path):
    run = explain(config, "norms", "--svg", tmp_path / "no" / "graph.svg")
    assert run.exit_code == 1
    assert run.stderr == f"{config}: --svg: no folder '{tmp_path / 'no'}'\n"
