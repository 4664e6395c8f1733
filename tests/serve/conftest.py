"""One running application for the tests that ask for it, as `coissue up` starts it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from serving import BROKEN, SERVED, Up, make_settings


class Shared:
    """It starts when a test asks for it, and ends before one that does without: an application that
    nobody asks anything takes half a core."""

    def __init__(self) -> None:
        self._up: Up | None = None
        self._stack = ExitStack()

    def get(self, folders, cache) -> Up:
        if self._up is not None and self._up.process.poll() is not None:
            self.end()
        if self._up is None:
            settings = make_settings(cache, SERVED | BROKEN)
            self._up = self._stack.enter_context(Up(folders.mktemp("up"), settings))
        return self._up

    def end(self) -> None:
        self._up = None
        self._stack.close()


SHARED = Shared()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Measured tables for all applications of a run."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def up(tmp_path_factory, cache):
    """The application with every tenant settled, whatever the test before did to it."""
    found = SHARED.get(tmp_path_factory, cache)
    found.wait_settled()
    return found


def pytest_collection_modifyitems(items):
    """Those that share it first; among them, last, those that end it."""

    def place(item):
        is_shared = "up" in getattr(item, "fixturenames", ())
        return not is_shared, is_shared and "shutdown" in item.path.name

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if "up" not in getattr(item, "fixturenames", ()):
        SHARED.end()


def pytest_sessionfinish():
    SHARED.end()
