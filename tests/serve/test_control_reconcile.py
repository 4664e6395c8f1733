"""What control does about a scheduler that dies, and about changed settings, without a
cluster: only Ray's errors are real."""

from __future__ import annotations

import asyncio
import shutil
from random import Random

import pytest
import ray.exceptions
from fake_control import FORMS, Owned, app, begin, leave, make, reconcile, scheduler, tenant

from coissue.deployments import control
from coissue.deployments.actor import NotOwnerError
from coissue.deployments.captures import Artifacts
from coissue.deployments.changes import is_lowered_anew, list_restart_keys
from coissue.deployments.settings import AppSettings, TenantSettings

__all__ = ("make", "scheduler")  # fixtures


def start(make, *names):
    async def main():
        settings = app(*map(tenant, names))
        made = await make(settings)
        made._change(settings, is_new=True)
        return made, await reconcile(made)

    return asyncio.run(main())


def test_a_tenant_that_kills_the_scheduler_fails_after_two_tries(make, scheduler):
    made, states = start(make, "first", "deadly", "last")
    assert scheduler.tries.count("deadly") == 2
    assert states["deadly"] == ("failed", "the scheduler died 2 times attaching it")
    assert states["first"] == states["last"] == ("ready", "")
    assert set(scheduler.served) == {"first", "last"}
    assert scheduler.told["deadly"] == states["deadly"]
    assert made._failures.shown == {"deadly": states["deadly"][1]}


def test_settings_that_the_scheduler_refuses_keep_no_tenant_away(make, scheduler):
    def refuse(settings, note):
        raise ray.exceptions.RayTaskError("configure", "a traceback", ValueError("no"))

    scheduler.configure = Owned(refuse)
    _, states = start(make, "a", "b")
    assert states == {"a": ("ready", ""), "b": ("ready", "")}
    assert scheduler.tries == ["a", "b"]


def test_an_error_of_attach_fails_that_tenant_alone(make, scheduler):
    _, states = start(make, "buggy", "wrong", "good")
    assert scheduler.tries == ["buggy", "wrong", "good"]
    assert states["buggy"] == ("failed", "attach failed: KeyError: 'lost'")
    assert states["wrong"] == ("failed", "reference 0: output 'y' differs")
    assert states["good"] == ("ready", "")


def test_a_new_scheduler_is_told_that_tenants_load_and_gets_them_again(make, scheduler):
    made, _ = start(make, "a", "wrong")
    scheduler.epoch, scheduler.served, scheduler.told = 7, {}, {}
    asyncio.run(reconcile(made, 1))
    assert scheduler.told["a"] == ("ready", "")
    assert scheduler.told["wrong"] == ("failed", "reference 0: output 'y' differs")
    assert scheduler.tries == ["a", "wrong", "a"]
    assert len(made._captures.jobs) == 2


def test_deaths_between_attaches_are_nobodys_fault(make, scheduler):
    made, _ = start(make, "a")
    for epoch in range(5):
        scheduler.epoch, scheduler.served = epoch + 10, {}
        assert asyncio.run(reconcile(made))["a"] == ("ready", "")


def test_only_what_changed_is_captured_and_it_becomes_a_new_version(make, scheduler):
    async def main():
        first = app(tenant("a"), tenant("b"), tenant("gone"))
        made = await begin(make, first)
        assert scheduler.served == {"a": 1, "b": 1, "gone": 1}
        made._change(app(tenant("a", kwargs={"n": 2}), tenant("b", slo="batch"), tenant("new")))
        assert scheduler.served["a"] == 1
        await reconcile(made)
        assert scheduler.served == {"a": 2, "b": 1, "new": 1}
        assert scheduler.tries == ["a", "b", "gone", "a", "new"]
        assert made._captures.jobs[3:] == [("a", 2), ("new", 1)]
        assert not made._artifacts.versions("gone")
        made._change(app(tenant("a", limits={"rows": 4, "in_flight": 9})))  # the first model again
        await reconcile(made)
        assert scheduler.served == {"a": 1}
        assert len(made._captures.jobs) == 5
        made._change(app(tenant("a", limits={"rows": 65})))  # more than was captured
        await reconcile(made)
        assert scheduler.served == {"a": 3}

    asyncio.run(main())


def test_a_failed_version_leaves_the_old_one_also_over_a_crash(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        made._change(app(tenant("a", kwargs={"broken": 1})))
        said = "version 2 failed, version 1 serves: no such op"
        assert (await reconcile(made))["a"] == ("failed", said)
        assert scheduler.told["a"][1] == made._failures.shown["a"] == said
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        await reconcile(made)
        assert scheduler.served == {"a": 1}
        assert scheduler.told["a"][1] == said
        assert len(made._captures.jobs) == 2
        made._change(app(tenant("a")))
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.told["a"][1] == ""
        assert not made._failures.shown

    asyncio.run(main())


def with_handler(name, **fields):
    return tenant("a", isolation="dedicated", handler={"use": f"team:{name}"}, **fields)


def handler_told(scheduler):
    return scheduler.settings["tenants"][0]["handler"]["use"]


def test_a_handler_that_cannot_be_loaded_fails_its_tenant(make, scheduler):
    async def main():
        settings = app(with_handler("bad"), tenant("b"))
        made = await make(settings)
        made._change(settings, is_new=True)
        assert await reconcile(made) == {"a": ("failed", "no such class"), "b": ("ready", "")}
        assert scheduler.served == {"b": 1}
        assert made._failures.shown == {"a": "no such class"}
        made._change(app(with_handler("good"), tenant("b")))
        assert (await reconcile(made))["a"] == ("ready", "")
        assert "a" in scheduler.served
        assert not made._failures.shown

    asyncio.run(main())


def test_a_changed_handler_replaces_the_old_one_once_it_is_loaded(make, scheduler):
    async def main():
        made = await begin(make, app(with_handler("one")))
        made._change(app(with_handler("bad", share=2.0)))
        said = "the changed handler failed, version 1 serves: no such class"
        assert (await reconcile(made))["a"] == ("failed", said)
        assert scheduler.told["a"] == ("failed", said)
        assert handler_told(scheduler) == "team:one"
        assert scheduler.settings["tenants"][0]["share"] == 2.0
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        await reconcile(made)  # also what a new scheduler gets
        assert handler_told(scheduler) == "team:one"
        made._change(app(with_handler("two")))
        await made._reconcile()
        assert handler_told(scheduler) == "team:one"  # until it is tried
        assert (await reconcile(made))["a"] == ("ready", "")
        assert handler_told(scheduler) == "team:two"
        made._change(app(with_handler("bad", kwargs={"n": 2})))  # a model with it
        assert (await reconcile(made))["a"][0] == "failed"
        assert handler_told(scheduler) == "team:two"
        assert scheduler.served == {"a": 1}
        assert [job for job in made._captures.jobs if job[1] == 1] == [("a", 1)]

    asyncio.run(main())


def test_what_is_being_prepared_is_told_to_a_new_scheduler_too(make, scheduler):
    async def main():
        made = await begin(make, app(with_handler("one")))
        made._change(app(with_handler("two")))
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        await made._reconcile()
        assert scheduler.served == {"a": 1}
        said = "another handler is being loaded, version 1 serves"
        assert scheduler.told["a"][1] == said
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.told["a"][1] == ""

    asyncio.run(main())


def test_a_bug_of_ours_fails_the_tenant_too(make, scheduler):
    async def main():
        made = await make(app(with_handler("bug"), tenant("b")))
        made._change(app(with_handler("bug"), tenant("b")), is_new=True)
        states = await reconcile(made)
        assert states == {"a": ("failed", "KeyError: 'lost'"), "b": ("ready", "")}

    asyncio.run(main())


MODELS = {"one": {}, "two": {"n": 2}, "broken": {"broken": 1}}


@pytest.mark.parametrize("seed", range(40))
def test_any_change_leaves_the_others_served_and_the_last_good_one_is_what_is_served(
    make, scheduler, seed
):
    rng = Random(seed)

    async def main():
        good = {}
        made = await begin(make, app(tenant("a"), tenant("b")))
        for step in range(12):
            form, model = rng.choice(list(FORMS)), rng.choice(list(MODELS))
            share = float(rng.randint(1, 3))
            wanted = tenant("a", kwargs=MODELS[model], share=share, **FORMS[form])
            if rng.random() < 0.3:  # it goes, and comes back before anybody is told
                made._change(app(tenant("b")))
            made._change(app(wanted, tenant("b"), tenant(f"new-{step}")))
            if rng.random() < 0.3:
                await made._reconcile()  # before anything is prepared
            dies = rng.choice(("none", "scheduler", "control"))
            if dies == "scheduler":
                scheduler.epoch, scheduler.served, scheduler.told = step + 10, {}, {}
            if dies == "control":  # another one takes over
                settings = made._held_dir.read_settings()
                other = await make(settings, scheduler._describe_served())
                for made_before in made._held_dir.path.iterdir():
                    if made_before.is_dir():
                        shutil.copytree(made_before, other._held_dir.path / made_before.name)
                made = other
                made._change(app(wanted, tenant("b"), tenant(f"new-{step}")), is_new=True)
            states = await reconcile(made)
            is_good = form != "bad own" and model != "broken"
            assert states["a"][0] == ("ready" if is_good else "failed"), (form, model, states)
            assert states["b"] == states[f"new-{step}"] == ("ready", "")
            assert set(scheduler.served) == {"a", "b", f"new-{step}"}
            told = (
                AppSettings.model_validate(scheduler.settings | {"tenants": [scheduler.kept["a"]]})
                .tenants[0]
                .model_dump()
            )
            good = (told | {"share": None}) if is_good else good
            assert told["share"] == share
            assert not good or told | {"share": None} == good

    asyncio.run(main())


def test_a_version_that_kills_the_scheduler_fails_and_the_old_one_serves(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))
        made._change(app(tenant("a", kwargs={"deadly": 1}), tenant("b")))
        state, reason = (await reconcile(made))["a"]
        assert state == "failed"
        assert reason.endswith("version 1 serves: the scheduler died 2 times attaching it")
        assert scheduler.served == {"a": 1, "b": 1}
        assert scheduler.tries == ["a", "b", "a", "a", "b", "a", "a", "b"]

    asyncio.run(main())


def test_control_that_finds_its_tenants_attached_touches_none_whose_files_are_as_they_were(
    make, scheduler, tmp_path
):
    async def main():
        file = tmp_path / "weights"
        file.write_bytes(b"1")
        stamp = (1, file.stat().st_mtime_ns)
        settings = app(tenant("a"), tenant("b"), tenant("c"))
        a, b, c = settings.tenants
        scheduler.served = {"a": 4, "b": 2}
        made = await make(settings, scheduler._describe_served())
        leave(made._run_dir.path, a, 4, {str(file): stamp})
        leave(made._run_dir.path, b, 2, {str(file): (2, 2)})
        leave(made._run_dir.path, c, 3, {str(file): stamp})
        made._change(settings, is_new=True)
        await reconcile(made)
        assert made._captures.jobs == [("b", 3)]
        assert scheduler.tries in (["b", "c"], ["c", "b"])
        assert scheduler.served == {"a": 4, "b": 3, "c": 3}

    asyncio.run(main())


def test_control_takes_back_what_the_one_before_it_said(make, scheduler):
    async def main():
        settings = app(tenant("a"))
        scheduler.served, scheduler.told = {"a": 4}, {"a": ("ready", "version 5 failed")}
        made = await make(settings, scheduler._describe_served())
        leave(made._run_dir.path, settings.tenants[0], 4)
        made._change(settings, is_new=True)
        await reconcile(made)
        assert scheduler.told["a"][1] == ""

    asyncio.run(main())


def test_a_tenant_that_goes_and_comes_back_before_the_scheduler_is_told(make, scheduler):
    """It is served all the time, so what is built into it must be built anew."""

    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))
        made._change(app(tenant("b")))
        made._change(app(tenant("a", exact=True), tenant("b")))
        assert made._wanted["a"].serving == 1
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.kept["a"]["exact"]
        made._change(app(tenant("b")))
        made._change(app(with_handler("bad", exact=True), tenant("b")))
        await made._reconcile()
        assert scheduler.kept["a"]["handler"] is None, "not before it is loaded"
        assert (await reconcile(made))["a"][1].endswith("version 2 serves: no such class")
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        await reconcile(made)
        assert scheduler.served == {"a": 2, "b": 1}

    asyncio.run(main())


def test_a_tenant_that_went_for_good_is_new_when_it_comes_back(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))
        made._change(app(tenant("b")))
        await reconcile(made)
        assert scheduler.served == {"b": 1}
        made._change(app(tenant("a"), tenant("b")))
        assert made._wanted["a"].serving == 0
        assert (await reconcile(made))["a"] == ("ready", "")
        assert made._captures.jobs == [("a", 1), ("b", 1), ("a", 2)]

    asyncio.run(main())


def test_a_capture_that_nobody_waits_for_is_not_taken_for_another(make, scheduler):
    """The tenant comes back with another model while its first capture still runs."""

    async def main():
        made = await begin(make, app(tenant("b")))
        made._change(app(tenant("a"), tenant("b")))
        made._wanted["a"].job.cancel()  # it has its number, and no end
        first = made._wanted["a"].coming
        made._change(app(tenant("b")))
        await reconcile(made)
        made._change(app(tenant("a", kwargs={"n": 2}), tenant("b")))
        leave(made._run_dir.path, app(tenant("a")).tenants[0], first)  # now it ends
        assert (await reconcile(made))["a"] == ("ready", "")
        assert made._captures.jobs[-1] == ("a", first + 1)
        assert scheduler.served["a"] == first + 1

    asyncio.run(main())


def test_what_went_while_control_died_is_detached_by_the_next(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))  # and dies
        other = await make(app(tenant("b")), scheduler._describe_served())
        shutil.copytree(made._run_dir.path, other._run_dir.path, dirs_exist_ok=True)
        other._change(app(tenant("b")), is_new=True)
        await reconcile(other)
        assert scheduler.served == {"b": 1}

    asyncio.run(main())


def test_what_an_attach_leaves_that_was_lost_is_detached(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        scheduler._attach(TenantSettings.model_validate(tenant("b")).model_dump(), 1, "")
        await reconcile(made, 2)
        assert scheduler.served == {"a": 1}

    asyncio.run(main())


def test_another_change_before_the_version_with_what_is_built_in_is_attached(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        made._change(app(tenant("a", exact=True)))
        await made._wanted["a"].job
        assert made._wanted["a"].fresh == 2
        made._change(app(tenant("a", exact=True, share=2.0)))
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.kept["a"]["exact"]

    asyncio.run(main())


def test_an_attach_that_was_lost_may_end_later(make, scheduler):
    """What control wants is attached again, whatever the scheduler was told last."""

    async def main():
        made = await begin(make, app(tenant("a")))
        late = app(tenant("a", kwargs={"n": 2}))
        leave(made._run_dir.path, late.tenants[0], 2)
        scheduler._attach(late.tenants[0].model_dump(), 2, "")
        await reconcile(made)
        assert scheduler.served == {"a": 1}
        made._change(late)
        await reconcile(made)
        assert made._wanted["a"].serving == scheduler.served["a"] == 2

    asyncio.run(main())


def test_control_dies_while_an_attach_is_under_way_that_its_last_settings_took_back(
    make, scheduler
):
    """exact, then not, then exact again: the scheduler has what nobody wants, under settings that
    say otherwise."""

    async def main():
        made = await begin(make, app(tenant("a", exact=True)))
        scheduler._attach(TenantSettings.model_validate(tenant("a")).model_dump(), 2, "")
        settings = made._held_dir.read_settings()
        assert settings.tenants[0].exact
        other = await make(settings, scheduler._describe_served())
        leave(other._run_dir.path, settings.tenants[0], 2)
        other._change(app(tenant("a", exact=True)), is_new=True)
        assert (await reconcile(other))["a"] == ("ready", "")
        assert scheduler.kept["a"]["exact"]

    asyncio.run(main())


def test_a_version_that_a_job_is_about_to_use_is_not_removed(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        for n in (2, 3, 4):
            made._change(app(tenant("a", kwargs={"n": n})))
            await reconcile(made)
        assert made._artifacts.versions("a") == [4, 3, 2]
        made._change(app(with_handler("good", kwargs={"n": 2})))
        assert made._wanted["a"].coming == 2
        for version in (5, 6):  # captures that failed
            (made._run_dir.path / f"a-{version}.json").write_text("{}")
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        await made._reconcile()  # attaches the fourth again
        leave(made._run_dir.path, app(tenant("a", kwargs={"n": 7})).tenants[0], 7)
        made._artifacts.prune("a", {4, made._wanted["a"].coming})
        assert made._artifacts.versions("a") == [7, 6, 5, 4, 3, 2]
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.served == {"a": 2}

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_settings_that_change_during_the_first_attach_are_told_to_be_prepared(
    make, scheduler, fails
):
    """Also over a scheduler that dies; what is not wanted any more may fail."""

    async def main():
        made = await make(app(tenant("a")))
        made._change(app(tenant("a")), is_new=True)
        await made._wanted["a"].job
        whole = scheduler._attach

        def attach(*given):
            scheduler.attach = Owned(whole)
            made._change(app(tenant("a", exact=True)))
            return "it does not fit" if fails else whole(*given)

        scheduler.attach = Owned(attach)
        await made._reconcile()
        said = "" if fails else "another version is being prepared, version 1 serves"
        assert (made._wanted["a"].state, made._wanted["a"].reason) == (
            "loading" if fails else "ready", said
        )  # fmt: skip
        assert scheduler.told["a"][1] == said
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        await made._reconcile()
        assert scheduler.told["a"][1] == said
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.kept["a"]["exact"]
        assert scheduler.told["a"][1] == ""

    asyncio.run(main())


def test_what_was_taken_back_may_fail_unseen(make, scheduler):
    """The old model is wanted again while the new one is attached, which fails."""

    async def main():
        made = await begin(make, app(tenant("a")))
        whole = scheduler._attach
        made._change(app(tenant("a", kwargs={"n": 2})))
        await made._wanted["a"].job

        class Slow:
            async def remote(self, owner, *given):
                scheduler.attach = Owned(whole)
                made._change(app(tenant("a")))
                await made._wanted["a"].job
                return "it does not fit"

        scheduler.attach = Slow()
        await made._reconcile()
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.told["a"][1] == ""
        assert not made._failures.shown
        assert scheduler.served == {"a": 1}

    asyncio.run(main())


def test_nothing_of_a_tenant_that_is_gone_is_left(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))
        (made._run_dir.path / "a-7.answer").write_text("{}")
        made._change(app(tenant("b")))
        await reconcile(made)
        assert not [path.name for path in made._run_dir.path.glob("a-*")]

    asyncio.run(main())


@pytest.mark.parametrize("goes", [False, True])
def test_what_is_built_in_changes_while_a_version_is_attached(make, scheduler, goes):
    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))
        whole = scheduler._attach

        def attach(*given):
            scheduler.attach = Owned(whole)
            if goes:
                made._change(app(tenant("b")))
            made._change(app(tenant("a", kwargs={"n": 2}, exact=True), tenant("b")))
            return whole(*given)

        scheduler.attach = Owned(attach)
        made._change(app(tenant("a", kwargs={"n": 2}), tenant("b")))
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.kept["a"]["exact"]
        assert scheduler.kept["a"]["model"]["kwargs"] == {"n": 2}
        assert made._wanted["a"].serving == scheduler.served["a"]

    asyncio.run(main())


def test_settings_that_change_while_a_version_is_attached(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        whole = scheduler._attach

        def attach(*given):
            scheduler.attach = Owned(whole)
            made._change(app(tenant("a")))  # back, while the second version comes
            return whole(*given)

        scheduler.attach = Owned(attach)
        made._change(app(tenant("a", kwargs={"n": 2})))
        await reconcile(made)
        assert scheduler.served == {"a": 1}

    asyncio.run(main())


def test_keys_that_need_a_restart():
    old = app(tenant("a"))
    health = {"misses": 9}
    live = app(tenant("a"), scheduler={"policy": "time_only", "health": health})
    assert list_restart_keys(old, live) == []
    new = app(
        tenant("a"), device={"threads": 2}, scheduler={"metrics_port": 1}, pool={"body_mib": 1}
    )
    assert list_restart_keys(old, new) == ["device.threads", "scheduler.metrics_port"]


def test_keys_that_only_attaching_knows():
    class More(TenantSettings):
        exactly: bool = False

    old = More.model_validate(tenant("a"))
    assert not is_lowered_anew(old, old.model_copy(update={"share": 2.0, "nan": "reject"}))
    assert is_lowered_anew(old, old.model_copy(update={"exactly": True}))


class Silent:
    """Answers a ping only while it is `well`."""

    def __init__(self):
        self.well = True
        self.ping = self

    async def remote(self, timeout_s):
        if not self.well:
            await asyncio.sleep(60)


def test_a_scheduler_is_given_up_after_so_many_missed_answers_in_a_row():
    async def main():
        health = app(tenant("a"), scheduler={
            "health": {"ping_timeout_ms": 10, "misses": 2, "start_timeout_ms": 1000}
        }).scheduler.health  # fmt: skip
        watch, scheduler = control.Watch(), Silent()
        scheduler.well = False
        for _ in range(5):
            assert await watch.ping(scheduler, health) == ""  # it may still be starting
        scheduler.well = True
        assert await watch.ping(scheduler, health) == ""
        scheduler.well = False
        assert await watch.ping(scheduler, health) == ""
        assert await watch.ping(scheduler, health) == "no answer 2 times in 10 ms each"
        await asyncio.sleep(1)
        assert await watch.ping(scheduler, health) == "no first answer in 1000 ms"

    asyncio.run(main())


class During:
    """An attach in the middle of which `event` happens, once."""

    def __init__(self, scheduler, event):
        self._scheduler, self._event, self._whole = scheduler, event, scheduler.attach

    async def remote(self, *given):
        self._scheduler.attach = self._whole
        await self._event()
        return await self._whole.remote(*given)


def test_settings_that_change_between_two_attaches_are_told_first(make, scheduler):
    """A new scheduler gets everything anew; an SLO class that came meanwhile it does not know."""

    async def main():
        made = await begin(make, app(tenant("a"), tenant("b")))
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        classes = {"fast": {"deadline_ms": 10}, "new": {"deadline_ms": 20}}

        async def change():
            made._change(app(tenant("a"), tenant("b", slo="new"), slo_classes=classes))

        scheduler.attach = During(scheduler, change)
        await made._reconcile()
        assert scheduler.served == {"a": 1}
        assert await reconcile(made) == {"a": ("ready", ""), "b": ("ready", "")}
        assert scheduler.kept["b"]["slo"] == "new"

    asyncio.run(main())


def test_nothing_is_prepared_for_a_tenant_that_went_while_it_was_attached(make, scheduler):
    async def main():
        made = await make(app(tenant("a"), tenant("b")))
        made._change(app(tenant("a"), tenant("b")), is_new=True)
        went = made._wanted["a"]
        await asyncio.gather(*(wanted.job for wanted in made._wanted.values()))

        async def go():
            made._change(app(tenant("a", exact=True), tenant("b")))
            made._change(app(tenant("b")))

        scheduler.attach = During(scheduler, go)
        await made._reconcile()
        assert went.job is None
        assert await reconcile(made) == {"b": ("ready", "")}
        assert scheduler.served == {"b": 1}

    asyncio.run(main())


def test_a_first_attach_that_ends_before_the_job_that_found_the_same_version(make, scheduler):
    async def main():
        made = await make(app(tenant("a")))
        made._change(app(tenant("a")), is_new=True)
        await made._wanted["a"].job

        async def change():
            made._change(app(tenant("a", exact=True)))
            made._change(app(tenant("a", exact=True, limits={"rows": 8})))

        scheduler.attach = During(scheduler, change)
        await made._reconcile()
        wanted = made._wanted["a"]
        assert (wanted.serving, wanted.coming) == (1, 1)
        await wanted.job
        assert (wanted.state, wanted.reason) == (
            "ready",
            "another version is being prepared, version 1 serves",
        )
        assert (await reconcile(made))["a"] == ("ready", "")
        assert scheduler.kept["a"]["exact"]

    asyncio.run(main())


def test_what_cannot_be_attached_again_is_tried_once(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        scheduler.epoch, scheduler.served, scheduler.told = 5, {}, {}
        whole, scheduler.attach = scheduler.attach, Owned(lambda *given: "it does not fit")
        assert (await reconcile(made))["a"] == ("failed", "it does not fit")
        scheduler.attach = whole
        await reconcile(made)
        assert not scheduler.served

    asyncio.run(main())


def test_a_control_replica_that_is_not_the_owner_changes_nothing(make, scheduler):
    async def main():
        made = await begin(make, app(tenant("a")))
        scheduler.owner = "another"
        made._change(app(tenant("a", share=2.0)))
        with pytest.raises(NotOwnerError):
            await made._reconcile()
        assert scheduler.kept["a"]["share"] == 1.0
        made._epoch = 0  # as after many refusals
        await reconcile(made)
        assert scheduler.kept["a"]["share"] == 2.0

    asyncio.run(main())


def test_the_number_of_a_version_that_was_removed_is_not_given_again(tmp_path):
    """Also by a control replica that found it there and did not give it."""
    leave(tmp_path, app(tenant("a")).tenants[0], 4)
    found = Artifacts(tmp_path)
    found.drop_others([])
    assert not list(tmp_path.iterdir())
    assert [found.next("a", 0), found.next("a", 7), found.next("b", 0)] == [5, 8, 1]
