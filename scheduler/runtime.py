"""One thread that owns the core and the device: events in, commands carried out.

    any thread --post(event)--> inbox --> core.handle(all that waits) --> commands
        Complete, Free -> executor at once;  WakeAt -> timed wait;  Launch -> executor, blocking

Rules. All events that wait are applied before one pump, so batches form while a launch runs.
A poster stamps its event with the runtime's clock when the thing happened; two posters can race
by microseconds, so an event that comes with an earlier time than the one before it is moved to
that time. Each turn ends with `Woke(now)`: decisions are made at the time of the turn, while
records keep the time of arrival. `call` runs a function on this thread between launches.
A launch runs here, on this thread, so the device needs no lock; limits.slots must be 1.
A bug (`InvariantViolation` or any unexpected exception) ends the thread through `on_crash`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeVar, final

from coissue.scheduler.core import Core
from coissue.scheduler.messages import (
    Command,
    Compile,
    CompileFailed,
    Complete,
    DeviceLost,
    Event,
    Free,
    Launch,
    LaunchDone,
    LaunchFailed,
    PlanReady,
    WakeAt,
    Woke,
)
from coissue.scheduler.ports import Clock, DeviceLostError, Executor

log = logging.getLogger("coissue.scheduler")
T = TypeVar("T")
_at_ns = attrgetter("at_ns")


def _is_launch(command: Command) -> bool:
    """Sorts launches last: answers must not wait for them."""
    return isinstance(command, Launch)


class RuntimeStoppedError(RuntimeError):
    """The runtime's thread has ended; the function was not run."""


class _Stop(Exception):
    """Leaves the loop."""


@final
class Runtime:
    """Start once, post from any thread, stop once."""

    def __init__(
        self,
        core: Core,
        executor: Executor,
        clock: Clock,
        *,
        on_crash: Callable[[str], None] | None = None,
    ) -> None:
        """`on_crash` is called on the runtime's thread, after its last turn."""
        if core.limits.slots != 1:
            raise ValueError("a blocking executor has one slot")
        self.core = core
        self._executor = executor
        self._clock = clock
        self._on_crash = on_crash
        #: Events, and functions to be run here. Unbounded: the window bounds what is admitted,
        #: and the channel what is on the way.
        self._inbox: SimpleQueue[Event | Callable[[], None]] = SimpleQueue()
        #: Time of the last turn.
        self._last_ns = 0
        self._wake_ns: int | None = None
        #: Guards `_running` against `call`: a future is either run or refused.
        self._lock = Lock()
        self._running = True
        self._thread = Thread(target=self._run, name="coissue-runtime", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """From any thread; never blocks. Ignored once the runtime has stopped."""
        self._inbox.put(event)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the device's thread between launches; the future has its result."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                self._settle(future, function)

        with self._lock:
            if not self._running:
                future.set_exception(RuntimeStoppedError("the scheduler's runtime has stopped"))
            else:
                self._inbox.put(run)
        return future

    def _settle(self, future: Future[T], function: Callable[[], T]) -> None:
        try:
            if not self._running:
                raise RuntimeStoppedError("the scheduler's runtime has stopped")
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread after the launch that runs; True when it has ended.

        Requests still open get no outcome: `Drain` and wait for `requests_open` first.
        """

        def stop() -> None:
            raise _Stop

        self._inbox.put(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        crash: str | None = None
        try:
            while True:
                self._turn()
        except _Stop:
            pass
        except Exception as error:
            log.exception("crash=1 stats=%s", self.core.stats())
            crash = f"{type(error).__name__}: {error}"
        with self._lock:
            self._running = False
        self._refuse_rest()
        if crash is not None and self._on_crash is not None:
            self._on_crash(crash)

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
                if not isinstance(item, Event):
                    item()
            except Empty:
                return
            except _Stop:
                continue

    def _turn(self) -> None:
        events = self._collect()
        for index, event in enumerate(events):
            if event.at_ns >= self._last_ns:
                break
            events[index] = replace(event, at_ns=self._last_ns)
        now_ns = max(self._clock.now_ns(), events[-1].at_ns if events else self._last_ns)
        events.append(Woke(now_ns))
        self._last_ns = now_ns
        if self._wake_ns is not None and self._wake_ns <= now_ns:
            self._wake_ns = None
        for command in sorted(self.core.handle(*events), key=_is_launch):
            self._carry_out(command)

    def _collect(self) -> list[Event]:
        """All events that wait, by time; blocks until there are some, or a wake-up is due."""
        events: list[Event] = []
        item = self._take(wait=True)
        while item is not None:
            if isinstance(item, Event):
                events.append(item)
            else:
                item()
            item = self._take(wait=False)
        events.sort(key=_at_ns)
        return events

    def _take(self, *, wait: bool) -> Event | Callable[[], None] | None:
        if not wait and self._inbox.empty():
            return None
        timeout_s = None
        if wait and self._wake_ns is not None:
            timeout_s = max(0.0, (self._wake_ns - self._clock.now_ns()) / 1e9)
        try:
            return self._inbox.get(wait, timeout_s)
        except Empty:
            return None

    def _carry_out(self, command: Command) -> None:
        match command:
            case Launch():
                self._launch(command)
            case Complete():
                self._executor.complete(command)
            case Free():
                self._executor.free(command.request)
            case WakeAt():
                self._wake_ns = command.at_ns
            case Compile():
                self._compile(command)
            case _:
                raise TypeError(f"no executor for {command}")

    def _launch(self, launch: Launch) -> None:
        try:
            measured_ns = self._executor.launch(launch)
        except DeviceLostError as error:
            log.exception("launch=%d device_lost=1", launch.launch)
            self.post(DeviceLost(self._clock.now_ns(), str(error)))
        except Exception as error:
            log.warning("launch=%d failed=%r", launch.launch, error)
            self.post(LaunchFailed(self._clock.now_ns(), launch.launch, str(error)))
        else:
            self.post(LaunchDone(self._clock.now_ns(), launch.launch, measured_ns))

    def _compile(self, compile: Compile) -> None:
        try:
            self._executor.compile(compile.signature)
        except Exception as error:
            log.warning("signature=%d compile_failed=%r", compile.signature, error)
            self.post(CompileFailed(self._clock.now_ns(), compile.signature, str(error)))
        else:
            self.post(PlanReady(self._clock.now_ns(), compile.signature))
