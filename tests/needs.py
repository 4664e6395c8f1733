"""What a test may lack: skipped with the reason, or failed where COISSUE_REQUIRE names it."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

TOOLS = {"cxx": ("g++", "clang++"), "prometheus": ("prometheus",), "wrk": ("wrk",)}


def lacks(name: str, reason: str) -> NoReturn:
    """Skips the test, or fails it where `name` is required."""
    required = name in os.environ.get("COISSUE_REQUIRE", "").split(",")
    (pytest.fail if required else pytest.skip)(reason)


def find_tool(name: str) -> str:
    """The path of an optional tool."""
    path = next(filter(None, map(shutil.which, TOOLS[name])), None)
    return path or lacks(name, f"needs {' or '.join(TOOLS[name])}, which is not installed")
