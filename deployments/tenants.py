"""The tenants of one scheduler: what serves each, and what replicas are told of it.

Both change on the runtime's loop only, in one step with the message to all clients: a request is
checked against, admitted to and run by the same version. Reading is possible from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import final

from msgspec import structs

from coissue.deployments.channel.frames import TenantInfo
from coissue.deployments.executor import ServedProgram
from coissue.scheduler.messages import Attached, Detached
from coissue.scheduler.ports import Clock
from coissue.scheduler.runtime import Runtime

logger = logging.getLogger("coissue.host")


@final
class Tenants:
    """`push` tells all clients what `infos` says now."""

    def __init__(self, runtime: Runtime, clock: Clock, push: Callable[[], None]) -> None:
        self._runtime = runtime
        self._clock = clock
        self._push = push
        #: Those that are served.
        self.programs: dict[str, ServedProgram] = {}
        #: All that replicas know, also those that load or failed.
        self.infos: dict[str, TenantInfo] = {}

    def announce(self, info: TenantInfo) -> None:
        """What a tenant is that has no program; one that is served keeps what it is, but for the
        reason why it has no later version."""

        def step() -> None:
            served = self.infos[info.name] if info.name in self.programs else None
            self.infos[info.name] = (
                structs.replace(served, reason=info.reason) if served is not None else info
            )

        self._change(step)

    def take_over(self, programs: Iterable[ServedProgram], infos: Iterable[TenantInfo]) -> None:
        """New requests use these from here on; those in flight keep theirs."""

        def step() -> None:
            for program in programs:
                self._runtime.post(Attached(self._clock.now_ns(), program.spec))
                self.programs[program.spec.name] = program
            self.infos.update({info.name: info for info in infos})

        self._change(step)

    def drop(self, name: str) -> None:
        """The tenant is unknown from now on; its requests in flight are answered."""

        def step() -> None:
            self.infos.pop(name, None)
            if self.programs.pop(name, None) is not None:
                self._runtime.post(Detached(self._clock.now_ns(), name))

        self._change(step)

    def put_out(self, name: str, message: str) -> None:
        """The core takes no more requests of it; called on the loop."""
        logger.error("tenant=%s out of service: %s", name, message)
        info = self.infos.get(name)
        if info is not None:
            reason = f"its requests failed again and again: {message}"
            self.infos[name] = structs.replace(info, state="failed", reason=reason)
        self._push()

    def _change(self, step: Callable[[], None]) -> None:
        def run() -> None:
            step()
            self._push()

        self._runtime.call(run).result()
