"""What a loop takes for a connection: the methods of a `Link`.

Apart, as a class that inherits from one that is not compiled gains little from compiling (decision
012): a `Link` inherits from none.
"""

from __future__ import annotations

import asyncio
from typing import Final

from coissue.deployments.channel.link import Link

_CALLS: Final = (
    "connection_made", "connection_lost", "get_buffer", "buffer_updated", "pause_writing",
    "resume_writing",
)  # fmt: skip


class Wire(asyncio.BufferedProtocol):
    def __init__(self, link: Link) -> None:
        for name in _CALLS:
            setattr(self, name, getattr(link, name))
