"""How requests come into the scheduler: the backend of one listening socket, on the runtime's loop.

Every request passes here, so it is compiled (decision 012); what control does is in `host`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from coissue.deployments.channel.backend import Answer, SubmitRequest
from coissue.deployments.channel.frames import Refused, TenantInfo, Times
from coissue.deployments.executor import Reply, Running
from coissue.scheduler.messages import Cancelled, RequestId, Submitted

if TYPE_CHECKING:
    from coissue.deployments.host import SchedulerHost


@final
class Door:
    """Number `index` of `doors`: makes its socket's handles unique in the scheduler."""

    def __init__(self, host: SchedulerHost, index: int, doors: int) -> None:
        self._host, self._index, self._doors = host, index, doors
        self._programs, self._infos = host.tenants.programs, host.tenants.infos
        self._executor, self._runtime, self._clock = host.executor, host.runtime, host.clock

    def _number(self, handle: int) -> RequestId:
        return RequestId(handle * self._doors + self._index)

    def submit(self, request: SubmitRequest, reply: Reply) -> None:
        name, rows, tokens = request.tenant, request.rows, request.tokens
        program, info = self._programs.get(name), self._infos.get(name)
        if program is None or info is None:
            self.count_refused(Refused(name, "unknown_tenant", 1))
            reply(Answer(reason="unknown_tenant", message=f"no tenant {name!r}"))
            return
        number, now_ns = self._number(request.handle), self._clock.now_ns()
        budget_ns = info.deadline_ns if request.budget_ns is None else request.budget_ns
        ports = zip(info.inputs, request.inputs, strict=True)
        inputs = {port.name: array for port, array in ports}
        self._executor.admit(number, Running(program, rows, tokens, inputs, reply, now_ns))
        self._runtime.post(
            Submitted(
                now_ns, number, name, rows, rows * tokens, now_ns + budget_ns, request.priority,
                program.bytes_needed(rows, tokens),
            )
        )  # fmt: skip

    def cancel(self, handle: int) -> None:
        self._runtime.post(Cancelled(self._clock.now_ns(), self._number(handle)))

    def directory(self) -> list[TenantInfo]:
        return self._host.directory()

    def count_refused(self, refused: Refused) -> None:
        self._host.count_refused(refused)

    def observe_times(self, times: Times) -> None:
        self._host.observe_times(times)

    def ask(self, what: str) -> bytes:
        return self._host.ask(what)
