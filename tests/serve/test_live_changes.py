"""`serve deploy` of changed settings, and processes that die or hang, under steady traffic."""

from __future__ import annotations

import copy
import json
import os
import signal
import time

import pytest
from serving import Up, list_processes, make_settings, poll
from traffic import RAW, Traffic, expect

LABELS = {"use": "classes", "kwargs": {"labels": ["a", "b", "c"], "input": "input"}}
FIRST = {
    "same": ("mlp", {"seed": 10}),
    "model": ("mlp", {"seed": 11}),
    "slo": ("mlp", {"seed": 12}),
    "gone": ("mlp", {"seed": 13}),
    "labelled": ("headed", {"seed": 1}),
    "own": ("mlp", {"seed": 14}),
}


@pytest.fixture(scope="module")
def live(tmp_path_factory, cache):
    settings = make_settings(cache, FIRST)
    tenant_of(settings, "labelled")["handler"] = LABELS
    health = {"ping_timeout_ms": 3000, "misses": 2, "orphan_timeout_ms": 60_000}
    settings["scheduler"]["health"] = health
    with Up(tmp_path_factory.mktemp("live"), settings) as up:
        states = up.wait_settled()
        assert set(states.values()) == {"ready"}, up.status()
        yield up


@pytest.fixture
def say(capsys):
    def say(text):
        with capsys.disabled():
            print(f"\n{text}")

    return say


def tenant_of(settings, name):
    return next(tenant for tenant in settings["tenants"] if tenant["name"] == name)


def changed(up):
    return copy.deepcopy(up.settings)


def plain(name, seed):
    model = {"factory": "tiny_models:mlp", "kwargs": {"seed": seed}}
    return {"name": name, "model": model, "slo": "fast", "limits": {"tokens": 64}}


def raw(**kwargs):
    return expect(kwargs)[0], RAW


def test_everything_changes_at_once_and_no_request_fails(live, say):
    """Added, removed, another model, another SLO class, another handler with another model."""
    body, old = expect({"seed": 11})
    _, new = expect({"seed": 31})
    sums = json.dumps({"sizes": [1, 2]})
    row = json.dumps({"inputs": [[0.25] * 32]})
    pids = [live.scheduler()["pid"], live.replica("Pool").pid, live.replica("Control").pid]

    settings = changed(live)
    settings["slo_classes"]["fast"] = {"deadline_ms": 21_000}
    tenant_of(settings, "model")["model"]["kwargs"]["seed"] = 31
    tenant_of(settings, "slo").update(
        slo="batch", share=2.0, nan="reject", limits={"tokens": 32, "rows": 8, "in_flight": 9}
    )
    labelled = tenant_of(settings, "labelled")
    labelled["model"]["kwargs"]["classes"] = 5
    labelled["handler"] = copy.deepcopy(LABELS)
    labelled["handler"]["kwargs"]["labels"] = list("vwxyz")
    tenant_of(settings, "own")["handler"]["kwargs"]["factor"] = 3.0
    settings["tenants"] = [t for t in settings["tenants"] if t["name"] != "gone"]
    own = {**copy.deepcopy(tenant_of(settings, "own")), "name": "added-own"}
    settings["tenants"] += [plain("added", 20), own]

    bodies = {
        "same": raw(seed=10), "model": (body, RAW), "slo": raw(seed=12), "gone": raw(seed=13),
        "labelled": (row, {}), "added": raw(seed=20), "own": (sums, {}),
        "added-own": (sums, {}),
    }  # fmt: skip
    with Traffic(live, bodies) as traffic:
        traffic.wait_more()
        deployed = live.deploy(settings, by_command=True)
        poll("SLO is the new one", lambda: live.tenant("slo").get("slo_class") == "batch")
        adjusted = time.monotonic() - deployed
        swapped = poll("new model", lambda: traffic.first("model", lambda s: s.has(new)))
        poll("new labels", lambda: b'"z"' in traffic.last("labelled").body)
        poll("added is served", lambda: traffic.last("added").status == 200)
        poll("its own code too", lambda: traffic.last("added-own").status == 200)
        poll("removed is unknown", lambda: traffic.last("gone").status == 404)
        poll("new handler", lambda: traffic.last("own").body != traffic.seen["own"][0].body)
        traffic.wait_more()
    say(f"deployed: SLO {adjusted:.1f} s, new version {swapped - deployed:.1f} s after")

    assert not traffic.failures("same", "model", "slo", "labelled", "own")
    statuses = [seen.status for seen in traffic.seen["gone"]]
    assert statuses == sorted(statuses)
    assert set(statuses) == {200, 404}
    for added in ("added", "added-own"):
        assert {seen.status for seen in traffic.seen[added]} == {404, 503, 200}
        statuses = [seen.status for seen in traffic.seen[added]]
        assert set(statuses[statuses.index(200) :]) == {200}
    versions = [seen.has(new) for seen in traffic.seen["model"]]
    assert versions == sorted(versions)
    assert all(seen.has(old) or seen.has(new) for seen in traffic.seen["model"])
    assert pids == [live.scheduler()["pid"], live.replica("Pool").pid, live.replica("Control").pid]
    slo = live.tenant("slo")
    assert (slo["deadline_ms"], slo["priority"], slo["in_flight_limit"]) == (60_000, 2, 9)
    assert (slo["rows_limit"], slo["version"]) == (8, 1)
    assert live.tenant("same")["deadline_ms"] == 21_000
    assert live.tenant("model")["version"] == 2
    assert live.tenant("gone") == {}


def answer_of(live, sums):
    reply = live.ask("POST", "/tenants/own", sums)
    return reply.status == 200 and reply.json


def test_a_config_that_is_refused_is_told_by_its_keys_and_changes_nothing(live):
    settings, first = changed(live), changed(live)
    tenant_of(settings, "slo")["slo"] = "nope"
    settings["pool"] = {"replica": 2}
    live.deploy(settings)
    at = [tenant["name"] for tenant in settings["tenants"]].index("slo")
    lines = [
        "args.pool.replica: unknown key",
        f"args.tenants.{at}.slo: no class 'nope' in slo_classes (there are: batch, fast)",
    ]
    poll("status says why", lambda: live.status()["deploy_error"].splitlines() == lines)
    told = "\n".join(["The config deployed last does not run:", *lines])
    poll("up says why", lambda: told in live.log.read_text())
    assert set(live.states().values()) == {"ready"}
    assert answer_of(live, json.dumps({"sizes": [1, 2]}))
    live.deploy(first)
    poll("all is well", lambda: live.status()["deploy_error"] == "")


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ({"use": "own_handler:Leaves"}, "left the process with status 3"),
        ({"use": "own_handler:Leaves", "kwargs": {"by": "SIGTERM"}}, "ended by signal 15"),
        ({"use": "own_handler:Holds"}, "took longer than"),
    ],
    ids=["leaves", "ends itself", "holds the GIL"],
)
def test_a_handler_that_spoils_its_process_leaves_the_old_one(live, handler, why):
    sums = json.dumps({"sizes": [1, 2]})
    before = live.ask("POST", "/tenants/own", sums).json
    settings, first = changed(live), changed(live)
    settings["capture"] = {"seconds": 10}
    tenant_of(settings, "own")["handler"] = handler
    with Traffic(live, {"own": (sums, {})}) as traffic:
        live.deploy(settings)
        poll("status says why", lambda: why in live.tenant("own").get("reason", ""))
        assert "the changed handler failed, version 1 serves" in live.tenant("own")["reason"]
        traffic.wait_more()
    assert not traffic.failures("own")
    assert {json.loads(seen.body)["pid"] for seen in traffic.seen["own"]} == {before["pid"]}
    control = live.replica("Control")
    os.kill(control.pid, signal.SIGKILL)  # the next one must not take the bad handler for served
    poll("another control", lambda: live.replica("Control").pid != control.pid)
    poll("it says why", lambda: why in live.tenant("own").get("reason", ""))
    assert answer_of(live, sums) == before
    live.deploy(first)
    poll("status is fine again", lambda: not live.tenant("own")["reason"])


def test_the_old_handler_serves_while_another_takes_its_time(live, tmp_path):
    sums, pipes = json.dumps({"sizes": [1, 2]}), {"first": tmp_path / "a", "second": tmp_path / "b"}
    for pipe in pipes.values():
        os.mkfifo(pipe)
    settings, first = changed(live), changed(live)
    kwargs = {name: str(pipe) for name, pipe in pipes.items()}
    slow = {"use": "own_handler:Waits", "kwargs": kwargs}
    tenant_of(settings, "own")["handler"] = slow
    with Traffic(live, {"own": (sums, {})}) as traffic:
        live.deploy(settings)
        poll("status says so", lambda: "being loaded" in live.tenant("own").get("reason", ""))
        traffic.wait_more()
        assert all(b"scaled" in seen.body for seen in traffic.seen["own"])
        for pipe in pipes.values():
            pipe.write_text("go")
        poll("the new one", lambda: b"waited" in traffic.last("own").body)
    assert not traffic.failures("own")
    live.deploy(first)
    poll("the old one again", lambda: answer_of(live, sums).get("scaled"))


def test_edited_code_of_a_handler_goes_live_with_another_revision(live, tmp_path):
    """The process that serves has imported the module before it was edited."""
    sums, code = json.dumps({"sizes": [1, 2]}), live.folder / "edited_team.py"
    text = (
        "from own_handler import Sums\n\n"
        "class Own(Sums):\n"
        "    def postprocess(self, outputs):\n"
        "        return {{'said': {said!r}, 'pid': __import__('os').getpid()}}\n"
    )
    code.write_text(text.format(said="first"))
    settings, first = changed(live), changed(live)
    handler = tenant_of(settings, "own")["handler"] = {"use": "edited_team:Own"}
    live.deploy(settings)
    before = poll("the first", lambda: (a := answer_of(live, sums)) and a.get("said") and a)
    code.write_text(text.format(said="edited"))
    handler["revision"] = "2"
    with Traffic(live, {"own": (sums, {})}) as traffic:
        live.deploy(settings)
        poll("the edited one", lambda: b"edited" in traffic.last("own").body)
    assert not traffic.failures("own")
    assert answer_of(live, sums)["pid"] == before["pid"]
    live.deploy(first)
    poll("the old one again", lambda: answer_of(live, sums).get("scaled"))


def test_a_tenant_gives_up_its_own_deployment_and_gets_it_back(live):
    """Handler, isolation and model at once; the others, and a new scheduler, are not held up."""
    sums, rows = json.dumps({"sizes": [1, 2]}), json.dumps({"inputs": {"input": [[1.0] * 8] * 2}})
    first, shared = changed(live), changed(live)
    own = tenant_of(shared, "own")
    del own["handler"], own["isolation"]
    own["model"]["kwargs"]["seed"] = 44
    shared["tenants"].append(plain("beside", 45))
    live.deploy(shared)
    poll("the new one beside it", lambda: live.tenant("beside").get("state") == "ready")
    poll("no handler any more", lambda: live.ask("POST", "/tenants/own", rows).json.get("outputs"))
    pid = live.scheduler()["pid"]
    os.kill(pid, signal.SIGKILL)
    poll("another scheduler", lambda: live.scheduler().get("pid", pid) != pid)
    live.wait_settled()
    assert live.ask("POST", "/tenants/own", rows).status == 200
    live.deploy(first)
    assert poll("its own code again", lambda: answer_of(live, sums))["scaled"]
    live.wait_settled()
    assert set(live.states().values()) == {"ready"}


def test_a_broken_model_leaves_the_old_version_and_going_back_is_quick(live, say):
    body, good = expect({"seed": 31})
    with Traffic(live, {"same": raw(seed=10), "model": (body, RAW)}) as traffic:
        settings = changed(live)
        tenant_of(settings, "model")["model"] = {"factory": "tiny_models:unexportable"}
        live.deploy(settings)
        poll("status says why", lambda: "failed" in live.tenant("model").get("reason", ""))
        told = live.tenant("model")
        assert (told["state"], told["version"]) == ("ready", 2)
        assert "version 3 failed, version 2 serves" in told["reason"]
        poll("serve status says why", lambda: "version 3 failed" in live.ray("status"))

        settings = changed(live)
        tenant_of(settings, "model")["model"] = plain("", 11)["model"]
        _, first = expect({"seed": 11})
        deployed = live.deploy(settings)
        back = poll("first version", lambda: traffic.first("model", lambda s: s.has(first)))
        say(f"back to a version that was captured before: {back - deployed:.1f} s")
        poll("nothing failed", lambda: "tenant-model" not in live.ray("status"))
        traffic.wait_more()
    assert not traffic.failures()
    assert all(seen.has(good) or seen.has(first) for seen in traffic.seen["model"])
    told = live.tenant("model")
    assert (told["state"], told["version"], told["reason"]) == ("ready", 1, "")


def test_a_tenant_with_its_own_code_goes_away(live):
    sums = json.dumps({"sizes": [1, 2]})
    with Traffic(live, {"own": (sums, {}), "added-own": (sums, {})}) as traffic:
        traffic.wait_more()
        settings = changed(live)
        settings["tenants"] = [t for t in settings["tenants"] if t["name"] != "added-own"]
        live.deploy(settings)
        poll("removed is unknown", lambda: traffic.last("added-own").status == 404)
        traffic.wait_more()
    assert not traffic.failures("own")
    statuses = [seen.status for seen in traffic.seen["added-own"]]
    assert statuses == sorted(statuses)
    assert set(statuses) == {200, 404}


def test_control_killed_changes_nothing_for_tenants(live, say):
    control, scheduler = live.replica("Control"), live.scheduler()["pid"]
    folder = live.run_dir()
    before = {entry.name: entry.stat().st_mtime_ns for entry in folder.glob("*/meta.json")}
    with Traffic(live, {"same": raw(seed=10), "slo": raw(seed=12)}) as traffic:
        traffic.wait_more()
        killed = time.monotonic()
        os.kill(control.pid, signal.SIGKILL)
        poll("another", lambda: control.pid not in [p.pid for p in live.processes()])
        assert live.replica("Control").pid != control.pid
        assert live.run_dir() == folder
        say(f"control killed: the next one is there {time.monotonic() - killed:.1f} s after")
        # It goes on working: settings still change.
        settings = changed(live)
        tenant_of(settings, "slo")["slo"] = "fast"
        live.deploy(settings)
        poll("SLO is the new one", lambda: live.tenant("slo").get("slo_class") == "fast")
        traffic.wait_more()
    assert not traffic.failures()
    assert live.scheduler()["pid"] == scheduler
    assert before == {e.name: e.stat().st_mtime_ns for e in folder.glob("*/meta.json")}
    assert not [p for p in live.processes() if "capture --serve" in p.title]


def test_a_scheduler_that_hangs_is_replaced(live, say):
    hung = list_processes()[live.scheduler()["pid"]]
    os.kill(hung.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    poll("it is gone", lambda: hung.pid not in list_processes())
    gone = time.monotonic() - stopped
    poll("another", lambda: live.scheduler().get("pid", hung.pid) != hung.pid)
    assert set(live.wait_settled().values()) == {"ready"}
    say(f"scheduler stopped: killed {gone:.1f} s, all tenants {time.monotonic() - stopped:.1f} s")
    assert live.tenant("model")["version"] == 1
    assert live.ask("POST", "/tenants/same", *raw(seed=10)).status == 200


def test_what_cannot_change_live_restarts_the_scheduler_and_says_so(live, say):
    scheduler, pool = live.scheduler()["pid"], live.replica("Pool").pid
    settings = changed(live)
    settings["device"]["memory_mib"] = 201
    deployed = live.deploy(settings)
    poll("another", lambda: live.scheduler().get("pid", scheduler) != scheduler)
    assert set(live.wait_settled().values()) == {"ready"}
    say(f"device.memory_mib: all tenants {time.monotonic() - deployed:.1f} s after")
    assert live.scheduler()["note"].startswith("device.memory_mib changed")
    assert live.replica("Pool").pid == pool
    assert live.ask("POST", "/tenants/same", *raw(seed=10)).status == 200
