"""One event loop that owns the core and the device: events in, commands carried out.

    any thread --post(event)--> inbox --> core.handle(all that waits) --> commands
        Complete, Free -> executor at once;  WakeAt -> a timer;  Launch -> executor, blocking

Rules. The loop is `Runtime.loop`, on a thread of its own; what brings requests in runs on it too,
so that nothing is handed between threads (docs/decisions/003). The loop reads what has arrived,
then the runtime's turn applies all of it before one pump, so batches form from what came while a
launch ran. A poster stamps its event with the runtime's clock when the thing happened; two
posters can race by microseconds, so an event that comes with an earlier time than the one before it
is moved to that time. Each turn ends with `Woke(now)`: decisions are made at the time of the turn,
while records keep the time of arrival. `call` runs a function here between launches.
With one slot a launch runs here, so the device needs no lock. With more (the baseline space_only)
each slot has a thread, launches run beside each other, and `call` does not wait for them.
A bug (`InvariantViolation` or any unexpected exception) ends the runtime through `on_crash`.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop, TimerHandle, new_event_loop, set_event_loop
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from threading import Lock, Thread, get_ident
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
    PutOut,
    WakeAt,
    Woke,
)
from coissue.scheduler.ports import (
    Clock,
    DeviceLostError,
    Executor,
    LaunchError,
    RuntimeStoppedError,
)

log = logging.getLogger("coissue.scheduler")
T = TypeVar("T")
_at_ns = attrgetter("at_ns")


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
        record: Callable[[list[Event], list[Command]], None] | None = None,
        new_loop: Callable[[], AbstractEventLoop] = new_event_loop,
    ) -> None:
        """`on_crash` is called on the loop, after the last turn; `record` after each turn of the
        core, with its events and commands."""
        self.core = core
        slots = core.limits.slots
        self._pool = ThreadPoolExecutor(slots, "coissue-slot") if slots > 1 else None
        self.loop = new_loop()
        self._executor = executor
        self._clock = clock
        self._on_crash = on_crash
        self._record = record
        #: Events, and functions to be run here. Unbounded: the window bounds what is admitted,
        #: and the channel what is on the way.
        self._inbox: deque[Event | Callable[[], None]] = deque()
        #: A turn is on its way that has not begun to empty the inbox.
        self._is_due = False
        #: Time of the last turn.
        self._last_ns = 0
        self._timer: TimerHandle | None = None
        #: Guards `_running` against `call`: a future is either run or refused.
        self._lock = Lock()
        self._running = True
        self._loop_thread = Thread(target=self._run, name="coissue-runtime", daemon=True)

    def start(self) -> None:
        self._loop_thread.start()

    def post(self, event: Event) -> None:
        """From any thread; never blocks. Ignored once the runtime has stopped."""
        self._inbox.append(event)
        self._wake()

    def _wake(self) -> None:
        """After an append: either the turn that is due sees it, or another one is due."""
        if self._is_due or not self._running:
            return
        self._is_due = True
        if get_ident() == self._loop_thread.ident:
            self.loop.call_soon(self._turn)
        else:
            self.loop.call_soon_threadsafe(self._turn)

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
                self._inbox.append(run)
                self._wake()
        return future

    def _settle(self, future: Future[T], function: Callable[[], T]) -> None:
        try:
            if not self._running:
                raise RuntimeStoppedError("the scheduler's runtime has stopped")
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the loop after the launch that runs; True when its thread has ended.

        Requests still open get no outcome: `Drain` and wait for `requests_open` first.
        """
        with self._lock:
            self._running = False
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._loop_thread.join(timeout_s)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        return not self._loop_thread.is_alive()

    def _run(self) -> None:
        set_event_loop(self.loop)
        self.loop.run_forever()
        self._end()
        self.loop.close()

    def _end(self) -> None:
        """Nothing is taken any more; calls that wait are refused."""
        with self._lock:
            self._running = False
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, Event):
                item()

    def _turn(self) -> None:
        self._is_due = False
        if not self._running:
            return
        try:
            self._advance(self._collect())
        except Exception as error:
            log.exception("crash=1 stats=%s", self.core.stats())
            self._end()
            if self._on_crash is not None:
                self._on_crash(f"{type(error).__name__}: {error}")

    def _collect(self) -> list[Event]:
        """All events that wait, by time; functions are run on the way."""
        events: list[Event] = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Event):
                events.append(item)
            else:
                item()
        events.sort(key=_at_ns)
        return events

    def _advance(self, events: list[Event]) -> None:
        for index, event in enumerate(events):
            if event.at_ns >= self._last_ns:
                break
            events[index] = replace(event, at_ns=self._last_ns)
        now_ns = max(self._clock.now_ns(), events[-1].at_ns if events else self._last_ns)
        events.append(Woke(now_ns))
        self._last_ns = now_ns
        launches = []
        commands: list[Command] = []
        try:
            commands = self.core.handle(*events)
        finally:  # of a turn that failed, too: its replay fails alike
            if self._record is not None:
                self._record(events, commands)
        for command in commands:
            if isinstance(command, Launch):
                launches.append(command)  # answers must not wait for them
            else:
                self._carry_out(command)
        for launch in launches:
            self._launch(launch)

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, (at_ns - self._clock.now_ns()) / 1e9)
        self._timer = self.loop.call_later(wait_s, self._wake)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Complete():
                self._executor.complete(command)
            case Free():
                self._executor.free(command.request)
            case WakeAt():
                self._wake_at(command.at_ns)
            case Compile():
                self._compile(command)
            case PutOut():
                self._executor.put_out(command.tenant, command.message)
            case _:
                raise TypeError(f"no executor for {command}")

    def _launch(self, launch: Launch) -> None:
        if self._pool is not None:
            self._pool.submit(lambda: self.post(self._run_launch(launch)))
            return
        event = self._run_launch(launch)
        is_done = isinstance(event, LaunchDone)
        if is_done and not self._inbox and self.core.ends_with(launch):
            # What arrived meanwhile cannot be late for a batch: answer at once.
            self._advance([event])
        else:
            self.post(event)

    def _run_launch(self, launch: Launch) -> Event:
        """What the launch came to."""
        try:
            measured_ns = self._executor.launch(launch)
        except DeviceLostError as error:
            log.exception("launch=%d device_lost=1", launch.launch)
            return DeviceLost(self._clock.now_ns(), str(error))
        except Exception as error:
            log.warning("launch=%d failed=%r", launch.launch, error)
            by_input = isinstance(error, LaunchError) and error.by_input
            return LaunchFailed(self._clock.now_ns(), launch.launch, str(error), by_input)
        return LaunchDone(self._clock.now_ns(), launch.launch, measured_ns)

    def _compile(self, compile: Compile) -> None:
        try:
            self._executor.compile(compile.signature)
        except Exception as error:
            log.warning("signature=%d compile_failed=%r", compile.signature, error)
            self.post(CompileFailed(self._clock.now_ns(), compile.signature, str(error)))
        else:
            self.post(PlanReady(self._clock.now_ns(), compile.signature))
