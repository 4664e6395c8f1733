"""Modules of a tenant's own, imported again when a file behind them changed."""

from __future__ import annotations

import sys

import pytest

from coissue.deployments import imports
from coissue.deployments.imports import import_anew


@pytest.fixture
def team(tmp_path, monkeypatch):
    """Writes files of a package `crew` and of a module `crew_words`."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)  # to the code under test, those of other tests are a tenant's own
    (tmp_path / "crew").mkdir()
    files = {"crew": "crew/__init__.py", "text": "crew/text.py", "words": "crew_words.py"}

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / files[name]).write_text(text)

    write(
        crew="",
        text="import numpy\nfrom crew_words import WORD\nMARK = object()\n",
        words="WORD = 1",
    )
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] in ("crew", "crew_words")]:
        del sys.modules[name]
    sys.modules.update(before)
    imports._files.clear()


def test_what_did_not_change_is_imported_once(team):
    first = import_anew("crew.text")
    assert import_anew("crew.text") is first


def test_a_changed_file_and_all_that_may_have_read_it_are_imported_anew(team):
    first, numpy = import_anew("crew.text"), sys.modules["numpy"]
    team(words="WORD = 'two'")
    second = import_anew("crew.text")
    assert (first.WORD, second.WORD) == (1, "two")
    assert second.MARK is not first.MARK
    assert sys.modules["numpy"] is numpy
    team(text="WORD = [3]")
    assert import_anew("crew.text").WORD == [3]
    assert import_anew("crew.text").WORD == [3]
    assert second.WORD == "two"  # whoever holds the old one keeps it


def test_a_broken_file_can_be_repaired(team):
    assert import_anew("crew.text").WORD == 1
    team(words="WORD = ")
    for _ in range(2):
        with pytest.raises(SyntaxError):
            import_anew("crew.text")
    team(words="WORD = 'good again'")
    assert import_anew("crew.text").WORD == "good again"


def test_a_file_that_is_gone_is_missed(team, tmp_path):
    import_anew("crew.text")
    (tmp_path / "crew_words.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="crew_words"):
        import_anew("crew.text")
