"""One running application for all tests here, as `coissue up` starts it."""

from __future__ import annotations

import pytest
from serving import BROKEN, SERVED, Up, make_settings


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Measured tables for all applications of a run."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def running(tmp_path_factory, cache):
    with Up(tmp_path_factory.mktemp("up"), make_settings(cache, SERVED | BROKEN)) as up:
        up.wait_settled()
        yield up


@pytest.fixture
def up(running):
    """The application with every tenant settled, whatever the test before did to it."""
    running.wait_settled()
    return running
