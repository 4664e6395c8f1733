"""`coissue explain`: one model end to end, in words, as a picture, as sources, which are those that
a scheduler builds; and mistakes."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import native_rig
import pytest
import test_host
import torch
from typer.testing import CliRunner

from coissue.deployments.capture.pipeline import capture
from coissue.deployments.cli.main import app
from coissue.deployments.config_file import IMPORT_PATH, load_app_config
from coissue.deployments.host import SchedulerHost

MODELS = {
    "norms": ("norms", {"width": 48}),
    "broken": ("no_such_factory", {}),
    "tagger": ("tagger", {}),
    "exact": ("norms", {"width": 48}),
}


@pytest.fixture(scope="module", autouse=True)
def _factories_are_found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    args = test_host.make_settings(folder, MODELS).model_dump(mode="json")
    args["device"]["native_kernels"] = args["tenants"][-1]["exact"] = True
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


@pytest.fixture(scope="module")
def tagger(config):
    run = explain(config, "tagger", "--source", "--svg", config.parent / "steps.svg")
    assert run.exit_code == 0, run.output
    return run.stdout


def find_sources(said):
    """Each whole, with the prelude that it says it comes after."""
    _, *parts = re.split(r"^// == (.*)\n", said, flags=re.MULTILINE)
    texts = dict(zip(parts[::2], (part.removesuffix("\n") for part in parts[1::2]), strict=True))
    return [
        texts[title.rpartition("after ")[2]] + text
        for title, text in texts.items()
        if not title.startswith("prelude")
    ]


def serve(config, name, cache):
    """Of each kind of kernel that a scheduler launches for this tenant alone: how many there are,
    and what is built of it."""
    _, settings = load_app_config(config)
    (tenant,) = (tenant for tenant in settings.tenants if tenant.name == name)
    device = settings.device.model_copy(update={"cache": str(cache)})
    capture(tenant.model, tenant.limits, name).save(cache / name)
    with tempfile.TemporaryDirectory(prefix="ci-explain-") as folder:
        host = SchedulerHost(settings.model_copy(update={"device": device}), folder)
        host.start()
        try:
            assert host.attach(tenant.model_dump(), 1, str(cache / name)) == ""
            host.forge.wait()
            (served,) = host._programs.values()
            kernels = served.lowered.kernels
            times, forge = Counter(kernel.signature for kernel in kernels), host.forge
            kinds = {kernel.signature: kernel for kernel in kernels}
            return [(times[name], forge._find(forge._key(k))) for name, k in kinds.items()]
        finally:
            host.stop()


@pytest.mark.parametrize(
    ("name", "bound_ms"), [("norms", 10.0), ("norms", 0.001), ("tagger", 10.0), ("exact", 10.0)]
)
def test_what_is_told_is_what_a_scheduler_builds(config, name, bound_ms, tmp_path):
    """Also where no kernel is joined with another, for the bound on a launch is too low."""
    chain = native_rig.find_chain()
    bound = json.loads(config.read_text())
    bound["applications"][0]["args"]["scheduler"]["preemption_bound_ms"] = bound_ms
    (tmp_path / "bound.yaml").write_text(json.dumps(bound))
    run = explain(tmp_path / "bound.yaml", name, "--source").stdout
    found = serve(tmp_path / "bound.yaml", name, tmp_path)
    builds = [(n, build) for n, build in found if build is not None]
    assert bool(builds) is (name != "exact")
    libraries = [call.library.split("-")[0] for _, build in builds for call in build.calls]
    assert Counter(map(chain.name_of, find_sources(run))) == Counter(libraries)
    launches = sum(n for n, _ in found)
    stitched = sum(n * len(own.calls) for n, build in builds for own in build.runs)
    recurrences = sum(n * len(build.recurrences) for n, build in builds)
    head, *named, inside = run.split("\n\n")[0].splitlines()
    assert f"{launches} after" in head
    assert len(named) == launches
    assert f"in {stitched} stitched" in inside
    assert (f"{recurrences} recurrence" in inside) == (recurrences > 0)


def test_the_runs_of_a_model_in_words_with_sources_and_a_picture(config, norms):
    head, before, after = norms.split("\n== ")
    # Before the product, which took GELU, product and sum along until the rest was joined, and
    # behind it.
    assert before.startswith("1. kernel 0: ops of rows: layer_norm\n")
    assert after.startswith("2. kernel 0: ops of rows: softmax, gelu, mul, add, layer_norm\n")
    launches, named, inside, *legend = head.strip().splitlines()
    assert any("%n is" in line for line in legend)
    assert launches.startswith(
        "launches: 3 before kernels are joined, 1 after, for this tenant alone;"
    )
    assert re.fullmatch(
        r"  kernel 0: joined layer_norm\+softmax\+linear\+4 #\w+, before: 0 to 2", named
    )
    assert inside.endswith("6 memory-bound ops, in 2 stitched kernels")
    assert "11 elementary ops and 0 views in 1 stitched kernel; bytes per unit:" in before
    assert "shared: " in after
    assert "not generated, for the library: linear" in after
    assert norms.count('extern "C"') == 2
    picture = ElementTree.parse(config.parent / "graph.svg").getroot()
    boxes = [e for e in picture.iter() if e.tag.endswith("}rect")]
    assert len(boxes) > 10


def test_recurrences_in_words_with_sources_and_in_the_picture(config, tagger):
    (steps,) = (part for part in tagger.split("\n== ") if "recurrence: lstm" in part)
    title, *words = steps.splitlines()
    assert title == "2. kernel 0: recurrence: lstm of 12 hidden units"
    assert "rows of all lengths advance together, and W_hh is read once per step" in words[1]
    assert "coissue_stitched_pack" in words[2]
    assert "constexpr int HIDDEN = 12;" in find_sources(tagger)[-1]
    picture = (config.parent / "steps.svg").read_text()
    assert "lstm step" in picture
    assert "W_hh" in picture
    assert ElementTree.fromstring(picture) is not None


def test_why_there_is_no_code(config):
    run = explain(config, "tagger", "--device", "cuda")
    assert "not generated, steps are for the CPU alone: lstm" in run.stdout
    assert "recurrence" not in run.stdout
    run = explain(config, "exact")
    assert "in them 0 memory-bound ops, in 0 stitched kernels\n" in run.stdout
    assert "not generated, exact: layer_norm x2, " in run.stdout


def test_a_factory_a_saved_program_and_the_only_tenant_of_a_config(config, norms, tmp_path):
    run = explain("tiny_models:norms")
    assert run.exit_code == 0
    assert run.stdout.count("\n== ") == norms.count("\n== ")
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Softmax(-1)).eval()
    rows = {0: torch.export.Dim("rows", max=1024)}
    program = torch.export.export(module, (torch.randn(3, 4),), dynamic_shapes=(rows,))
    torch.export.save(program, tmp_path / "saved.pt2")
    run = explain(tmp_path / "saved.pt2")
    assert run.exit_code == 0
    assert "ops of rows: softmax" in run.stdout
    one = json.loads(config.read_text())
    del one["applications"][0]["args"]["tenants"][1:]
    (tmp_path / "one.yaml").write_text(json.dumps(one))
    assert explain(tmp_path / "one.yaml", "--source").stdout == norms
    assert "TENANT: missing, one of: norms, broken, tagger" in explain(config).output


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
    assert "units are packed: 4 units of a launch are one below" in run.stdout, "64 units"
    run = explain(config, "norms", "--device", "cuda", "--units", "1")
    assert "units are packed" not in run.stdout


def test_launches_of_many_units(config):
    run = explain(config, "norms", "--device", "cuda", "--units", "4096")
    assert run.exit_code == 0
    assert "units are packed: 4 units of a launch are one below" in run.stdout
    assert "--device cuda only" in explain(config, "norms", "--units", "2").stderr


@pytest.mark.parametrize(
    ("tenant", "words"),
    [("none", ["TENANT: 'none', one of: norms, broken, tagger"]), ("broken", ["no_such_factory"])],
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
    assert (
        run.stderr
        == f"{config}: --svg: '{tmp_path / 'no' / 'graph.svg'}' is a folder, or in none\n"
    )
