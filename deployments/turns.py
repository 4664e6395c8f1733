"""Turns for work that is mostly short, where some of it may hang: it must not keep the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final


@final
class Turns:
    """`count` at a time. Whoever is over its seconds goes on, but another may begin; `most` bounds
    all of them together."""

    def __init__(self, count: int, most: int) -> None:
        self._all = asyncio.Semaphore(max(count, most))
        self._turns = asyncio.Semaphore(count)

    @asynccontextmanager
    async def take(self, seconds: float) -> AsyncIterator[None]:
        async with self._all:
            await self._turns.acquire()
            over = asyncio.get_running_loop().call_later(seconds, self._turns.release)
            try:
                yield
            finally:
                if asyncio.get_running_loop().time() < over.when():
                    over.cancel()
                    self._turns.release()
