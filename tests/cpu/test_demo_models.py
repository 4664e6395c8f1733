"""The demo's models and data: factories keep their contract, sets are honest, one backbone."""

import csv
import hashlib

import pytest
import torch
import yaml

from coissue.deployments.settings import AppSettings
from load_tests.demo import data, models
from load_tests.demo.minilm import load_minilm
from load_tests.parity import models as parity

CLASSES = {**dict.fromkeys(data.DIGIT_TASKS + data.SEQUENCE_TASKS, 10)} | {
    "iris": 3, "wine": 3, "breast-cancer": 2,
}  # fmt: skip


def build(task):
    if task in data.TEXT_TASKS:
        return models.text_classifier(task, untrained=True)
    factory = models.table if task in data.TABLE_TASKS else models.digits
    return factory(task, untrained=True)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# One text tenant shows it for all six: what differs, the heads, has a test of its own.
@pytest.mark.parametrize("task", [t for t in data.TASKS if t not in data.TEXT_TASKS[1:]])
def test_factory_keeps_its_contract(task):
    """Eval mode, samples by argument name, at least two rows, and rows do not mix."""
    module, samples = build(task)
    assert not any(part.training for part in module.modules())
    assert all(len(value) >= 2 for value in samples.values())
    with torch.no_grad():
        together = module(**samples)
        alone = [module(**{k: v[i : i + 1] for k, v in samples.items()}) for i in range(3)]
    assert together.shape == (3, CLASSES.get(task, 2))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("task", data.TEXT_TASKS)
def test_head_fits_its_labels_and_ignores_padding(task):
    head = models.build_module(task).eval()
    hidden, mask = torch.randn(2, 5, models.HIDDEN), torch.ones(2, 5, dtype=torch.long)
    mask[:, 3:] = 0
    poisoned = hidden.clone()
    poisoned[:, 3:] = 1e6
    with torch.no_grad():
        out = head(hidden, mask)
        assert out.shape == (2, len(data.read_texts(task).labels))
        torch.testing.assert_close(out, head(poisoned, mask))
        torch.testing.assert_close(out, head(hidden[:, :3], mask[:, :3]))


def test_backbone_is_equal_in_every_text_tenant():
    def digest(task):
        module, _ = models.text_classifier(task, untrained=True)
        content = hashlib.sha256()
        for name, value in sorted(module.backbone.state_dict().items()):
            content.update(name.encode() + value.numpy().tobytes())
        return content.hexdigest()

    assert digest("sentiment") == digest("topic")


def test_encoder_is_the_one_of_transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertModel.from_pretrained(
        data.backbone_folder(), add_pooling_layer=False, attn_implementation="sdpa"
    ).eval()
    ids = torch.randint(0, 30000, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        ours = load_minilm(data.backbone_folder())(ids, mask)
        wanted = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    seen = mask.bool()
    torch.testing.assert_close(ours[seen], wanted[seen], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("task", data.TEXT_TASKS)
def test_text_sets_are_disjoint_and_balanced(task):
    texts = data.read_texts(task)
    train, test = {text for text, _ in texts.train}, {text for text, _ in texts.test}
    assert len(train) == len(texts.train)
    assert len(test) == len(texts.test) >= 20
    assert not train & test
    for part in (texts.train, texts.test):
        counts = [sum(label == index for _, label in part) for index in range(len(texts.labels))]
        assert len(set(counts)) == 1
    with (data.FOLDER / f"{task}.tsv").open(encoding="utf-8") as file:
        assert {len(row) for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)} == {3}


@pytest.mark.parametrize("task", ["digits-wide", "digits-lstm", "iris"])
def test_array_sets_fit_their_factories(task):
    arrays = data.read_arrays(task)
    _, samples = build(task)
    (sample,) = samples.values()
    assert arrays.test_x.shape[1:] == tuple(sample.shape[1:])
    assert len(arrays.labels) == CLASSES[task]
    assert len(arrays.train_x) > len(arrays.test_x) > 0


@pytest.mark.parametrize("name", ["demo", "empty", "backbone"])
def test_config_is_valid(name):
    document = yaml.safe_load((data.ROOT / "configs" / f"{name}.yaml").read_text())
    (application,) = document["applications"]
    assert application["import_path"] == "coissue.deployments.app:build"
    settings = AppSettings.model_validate(application["args"])
    names = {"demo": data.TASKS, "empty": ("empty",)}.get(
        name, tuple(f"head-{index}" for index in range(parity.TENANTS))
    )
    assert tuple(sorted(tenant.name for tenant in settings.tenants)) == tuple(sorted(names))


def test_demo_config_has_the_labels_of_the_sets():
    document = yaml.safe_load((data.ROOT / "configs" / "demo.yaml").read_text())
    settings = AppSettings.model_validate(document["applications"][0]["args"])
    assert len(settings.slo_classes) == 2
    for tenant in settings.tenants:
        if tenant.handler is not None:
            assert tuple(tenant.handler.kwargs["labels"]) == data.read_texts(tenant.name).labels


def test_parity_backbones_share_all_but_the_head():
    first, samples = parity.backbone(0)
    second, _ = parity.backbone(1)
    equal = {
        name: torch.equal(value, second.state_dict()[name])
        for name, value in first.state_dict().items()
    }
    assert {name for name, same in equal.items() if not same} == {"8.weight", "8.bias"}
    assert first(**samples).shape == (3, parity.CLASSES)
