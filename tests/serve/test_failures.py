"""What `serve status` tells of failed tenants: with a Serve that remembers what it was told."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing Ray
    from coissue.deployments import failures
    from coissue.deployments.discovery import FAILED_PREFIX


class Serve:
    def __init__(self, shown=()):
        self.shown = {FAILED_PREFIX + name: "" for name in shown}
        self.refuses = False

    def status(self):
        return SimpleNamespace(applications={"coissue": None, **self.shown})

    def RunTarget(self, app, name, route_prefix):  # Serve's name
        return SimpleNamespace(app=app, name=name)

    def run_many(self, targets, **options):
        if self.refuses:
            raise RuntimeError("no")
        self.shown |= {target.name: target.app for target in targets}

    def delete(self, name, _blocking):
        del self.shown[name]


@pytest.fixture
def make(monkeypatch):
    """`Failures` beside what an earlier control replica shows."""

    def make(*shown):
        serve = Serve(shown)
        monkeypatch.setattr(failures, "serve", serve)
        monkeypatch.setattr(failures.ray, "is_initialized", lambda: True)
        bound = SimpleNamespace(options=lambda name: SimpleNamespace(bind=lambda reason: reason))
        monkeypatch.setattr(failures, "as_deployment", lambda _: bound)
        made.append(failures.Failures())
        return serve, made[-1]

    made = []
    yield make
    for each in made:
        each._thread.shutdown()


def told(serve, failing, reasons):
    failing.show(reasons)
    failing._thread.submit(lambda: None).result()
    return {name.removeprefix(FAILED_PREFIX): reason for name, reason in serve.shown.items()}


def test_exactly_those_that_failed_are_shown(make):
    serve, failing = make()
    assert told(serve, failing, {}) == {}
    assert told(serve, failing, {"a": "no", "b": "never"}) == {"a": "no", "b": "never"}
    assert told(serve, failing, {"b": "not now"}) == {"b": "not now"}
    assert told(serve, failing, {}) == {}


@pytest.mark.parametrize("reasons", [{}, {"a": "no"}, {"c": "no"}])
def test_what_an_earlier_control_showed_goes(make, reasons):
    serve, failing = make("a", "b")
    assert told(serve, failing, reasons) == reasons


def test_a_serve_that_refuses_is_asked_again_with_the_next_change(make):
    serve, failing = make()
    serve.refuses = True
    assert told(serve, failing, {"a": "no"}) == {}
    serve.refuses = False
    assert told(serve, failing, {"a": "no", "b": "no"}) == {"a": "no", "b": "no"}
