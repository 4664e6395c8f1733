"""Files of the cache folder: replaced whole or not at all, whoever else writes them."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: Numbers in them are less: larger ones are damage, and floats do not hold them.
MOST: Final = 1 << 53

logger = logging.getLogger("coissue.kernels")


def fresh_name(folder: Path) -> Path:
    """A name that nobody else has: processes of two containers may have one pid."""
    return folder / f"partial-{secrets.token_hex(8)}"


def replace_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = fresh_name(path.parent)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_json(path: Path, device: str) -> dict[str, Any]:
    """What `save_json` wrote of the same `device`; else empty."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) and stored.get("device") == device else {}


def save_json(path: Path, data: Mapping[str, object]) -> None:
    """Where it cannot be written, a warning says so: what is measured serves this process, and the
    next one measures again."""
    try:
        replace_file(path, json.dumps(data, indent=1).encode())
    except OSError as error:
        logger.warning("measured times are not kept: %s", error)
