"""Where the command `coissue` starts: until all is imported, Ctrl-C just ends it."""

from __future__ import annotations

import signal


def run() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from coissue.deployments.cli.main import app

    signal.signal(signal.SIGINT, signal.default_int_handler)
    app()
