"""The scheduler of one device, whole: channel, core, device, metrics. Needs no Ray.

Two kinds of threads: the runtime's loop (requests in, core, device, answers out), and callers of
the control methods (configure, attach, status). `directory` is the one truth about tenants that
replicas see; it holds tenants that load or failed too, with the reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO, final
from wsgiref.simple_server import WSGIServer

import uvloop

from coissue.deployments.attach import Attacher, AttachError, describe_tenant
from coissue.deployments.changes import list_restart_keys
from coissue.deployments.channel.frames import Endpoint, Refused, TenantInfo, Times
from coissue.deployments.channel.server import ChannelServer
from coissue.deployments.costs import Costs
from coissue.deployments.discovery import settle_garbage
from coissue.deployments.door import Door
from coissue.deployments.executor import DeviceExecutor, ServedProgram
from coissue.deployments.http.errors import STATUS
from coissue.deployments.metrics import Levels, SchedulerMetrics
from coissue.deployments.settings import MS, AppSettings, SloClass, TenantSettings
from coissue.deployments.tenants import Tenants
from coissue.deployments.timeline import Timeline
from coissue.kernels.cost_table import CostTable
from coissue.kernels.cpu.device import CpuDevice
from coissue.kernels.cpu.measure import GRID
from coissue.kernels.cpu.native import Forge, find_toolchain
from coissue.scheduler.clock import MonotonicClock
from coissue.scheduler.core import Core
from coissue.scheduler.messages import Drain, PolicyChosen
from coissue.scheduler.policies import POLICIES
from coissue.scheduler.ports import CoreLimits
from coissue.scheduler.recording import Recorder
from coissue.scheduler.runtime import Runtime
from coissue.scheduler.trace import describe

logger = logging.getLogger("coissue.host")
COLLECT_SECONDS: Final = 0.5
DRAIN_SECONDS: Final = 5.0


@final
class SchedulerHost:
    """Start once, stop once. Control methods may be called from any thread."""

    def __init__(
        self, settings: AppSettings, run_dir: str, *, on_crash: Callable[[str], None] | None = None
    ) -> None:
        self.settings = self._built = settings
        #: For the status: what control wants users to know, and what this process does.
        self._note = self._own_note = ""
        #: Tells one process's memory from the next.
        self.epoch = time.time_ns()
        cache = settings.device.cache_dir
        native = settings.device.native_kernels
        self.forge = Forge(cache / "native", find_toolchain()) if native else None
        self.device = CpuDevice(
            threads=settings.device.threads,
            memory_bytes=settings.device.memory_bytes,
            cache_dir=cache,
            forge=self.forge,
        )
        if why := _find_fault(cache):
            self._own_note = f"device.cache: nothing is kept in {str(cache)!r}: {why}"
            logger.warning("%s", self._own_note)
        self._costs_file = cache / "costs.json"
        self.costs = Costs(CostTable())
        self._costs_of = f"{self.device.name}, grid {GRID}" + ", native" * native
        self.costs.table.load(self._costs_file, self._costs_of)
        self._recording: TextIO | None = None
        self.executor = DeviceExecutor(self.device, lambda *said: self.tenants.put_out(*said))
        self.clock = MonotonicClock()
        recorder = self._start_recorder()
        core = Core(
            self._core_limits(), settings.scheduler.policy, recorder or self.costs, Random(0)
        )
        self.runtime = Runtime(
            core, self.executor, self.clock, on_crash=on_crash,
            record=recorder.record if recorder else None, new_loop=uvloop.new_event_loop,
        )  # fmt: skip
        bound_ns = settings.scheduler.join_bound_ns
        self.attacher = Attacher(self.device, self.costs, self.runtime, bound_ns)
        self.metrics = SchedulerMetrics(self.device.name, self._levels)
        self.timeline = Timeline()
        #: Around the attacher, for as long as it takes to bring a tenant up.
        self._attaching = threading.Lock()
        self._collecting = threading.Lock()
        self.tenants = Tenants(self.runtime, self.clock, lambda: self.channel.push_directory())
        self.channel = _Channel(self, settings, run_dir)
        #: Of the tenants, for requests.
        self._programs, self._infos = self.tenants.programs, self.tenants.infos
        # From the start all tenants of the settings, so that none is ever unknown to a replica.
        for tenant in settings.tenants:
            self._infos[tenant.name] = self._describe(tenant)
        self._metrics_server: WSGIServer | None = None

    def _start_recorder(self) -> Recorder | None:
        path = self.settings.scheduler.record_to
        if path is None:
            return None
        with _naming_key("scheduler.record_to"):
            # By lines, so that a crash loses none.
            file = open(path, "w", buffering=1)  # noqa: SIM115 - open as long as the host: see `stop`
        self._recording = file
        return Recorder(
            file.write, self.costs, limits=self._core_limits(),
            policy=self.settings.scheduler.policy, name=self.costs.name,
        )  # fmt: skip

    def _core_limits(self) -> CoreLimits:
        scheduler = self.settings.scheduler
        return CoreLimits(
            window=scheduler.window,
            slots=scheduler.slots,
            bytes=self.settings.device.memory_bytes,
            preemption_bound_ns=round(scheduler.preemption_bound_ms * MS),
            hold_ns=round(scheduler.hold_ms * MS),
            fair_window_ns=round(scheduler.fair_window_ms * MS),
            admission=scheduler.admission,
        )

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        self.runtime.start()
        self.channel.start()
        port = self.settings.scheduler.metrics_port
        if port is not None:
            self._metrics_server = self.metrics.serve(port)
            if port not in (0, self.metrics_port):
                said = f"scheduler.metrics_port: {port} cannot be used, Prometheus has to ask"
                said = f"{said} {self.metrics_port or 'an ingress for /metrics'}"
                self._own_note = "; ".join(filter(None, (self._own_note, said)))
        settle_garbage()
        logger.info("scheduler up endpoint=%s device=%s", self.endpoint, self.device.name)

    def stop(self) -> None:
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        self.channel.stop()
        self.runtime.stop()
        if self.forge is not None:
            self.forge.close()
        if self._recording is not None:
            self._recording.close()
        self.attacher.forget_outdated()
        self.costs.table.save(self._costs_file, self._costs_of)

    @property
    def endpoint(self) -> Endpoint:
        return self.channel.endpoint

    @property
    def metrics_port(self) -> int:
        """Where Prometheus finds this scheduler on 127.0.0.1; 0: nowhere."""
        return self._metrics_server.server_port if self._metrics_server else 0

    # --- control -------------------------------------------------------------------------------

    def attached(self) -> dict[str, int]:
        """Version of each tenant served, once no attach is under way."""
        with self._attaching:
            return {name: program.version for name, program in self._programs.items()}

    def describe_served(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Version of each tenant and all settings that it is served under, for a new owner."""
        with self._attaching:
            return {
                name: (program.version, self.attacher.settings(name).model_dump())
                for name, program in self._programs.items()
            }

    def configure(self, settings: dict[str, Any], note: str = "") -> list[str]:
        """Take over changed settings. Tenants that are not there any more are detached, served
        ones adjusted, others announced; new programs come by `attach`. Returns the keys that only
        a new scheduler takes over."""
        with self._attaching:
            parsed = AppSettings.model_validate(settings)
            if parsed.scheduler.policy != self.settings.scheduler.policy:
                self.set_policy(parsed.scheduler.policy)
            self.settings, self._note = parsed, note
            classes = parsed.slo_classes.items()
            self.metrics.set_objectives({name: each.objective for name, each in classes})
            tenants = {tenant.name: tenant for tenant in parsed.tenants}
            for name in [name for name in self._infos if name not in tenants]:
                self._detach(name)
            served = [tenant for name, tenant in tenants.items() if name in self._programs]
            adjusted = {t.name: self.attacher.adjust(t, self._slo(t)) for t in served}
            changed = [program for program in adjusted.values() if program is not None]
            added = [tenant for name, tenant in tenants.items() if name not in self._infos]
            self._take_over(changed, [t for t in served if adjusted[t.name]], added)
        return list_restart_keys(self._built, parsed)

    def announce(self, tenant: dict[str, Any], state: str, reason: str) -> None:
        """Let replicas know of a tenant that is not attached (loading, failed). One that is served
        in an earlier version stays ready, with the reason why it has no later one."""
        self.tenants.announce(self._describe(TenantSettings.model_validate(tenant), state, reason))

    def attach(self, tenant: dict[str, Any], version: int, artifact: str) -> str:
        """Bring a captured tenant to READY; "" or the sentence that says why not."""
        parsed = TenantSettings.model_validate(tenant)
        try:
            with self._attaching:
                changed = self.attacher.attach(parsed, self._slo(parsed), version, Path(artifact))
                self._take_over(changed, [parsed], is_attach=True)
        except AttachError as error:
            return str(error)
        return ""

    def _take_over(
        self,
        changed: list[ServedProgram],
        tenants: list[TenantSettings],
        added: Sequence[TenantSettings] = (),
        *,
        is_attach: bool = False,
    ) -> None:
        """`tenants`: those of `changed` whose settings changed too; `added`: new, not served."""
        programs = {program.spec.name: program for program in changed}
        infos = [self._describe(tenant) for tenant in added]
        for tenant in tenants:
            # Not `tenant` itself: what is served may be an earlier version.
            own = self.attacher.settings(tenant.name)
            reason = "" if is_attach else self._infos[own.name].reason  # control says when it goes
            infos.append(self._describe(own, "ready", reason, programs[own.name]))
            self.metrics.name_tenant(own.name, own.slo)
        self.tenants.take_over(changed, infos)

    def _describe(
        self,
        tenant: TenantSettings,
        state: str = "loading",
        reason: str = "",
        program: ServedProgram | None = None,
    ) -> TenantInfo:
        return describe_tenant(tenant, self._slo(tenant), state, reason, program)

    def _slo(self, tenant: TenantSettings) -> SloClass:
        return self.settings.slo_classes[tenant.slo]

    def _detach(self, name: str) -> None:
        """The tenant is unknown from now on; its requests in flight are answered."""
        self.tenants.drop(name)
        self.attacher.detach(name)

    def ping(self, timeout_s: float) -> int:
        """The pid, once the loop has had a turn. Raises `TimeoutError`."""
        self.runtime.call(lambda: None).result(timeout_s)
        return os.getpid()

    def drain(self) -> None:
        """Refuse new requests and wait a while for those in flight; to be followed by `stop`."""
        self.runtime.post(Drain(self.clock.now_ns()))
        until = time.monotonic() + DRAIN_SECONDS
        stats = self.runtime.core.stats
        while self.runtime.call(stats).result().requests_open and time.monotonic() < until:
            time.sleep(0.02)  # on a control thread: nobody is told when the last request ends

    def set_policy(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(sorted(POLICIES))}")
        self.runtime.post(PolicyChosen(self.clock.now_ns(), policy))

    # --- requests ------------------------------------------------------------------------------

    def directory(self) -> list[TenantInfo]:
        return list(self._infos.values())

    def count_refused(self, refused: Refused) -> None:
        """Names that clients made up become one series, so that they cannot fill the memory."""
        tenant = refused.tenant if refused.tenant in self._infos else ""
        reason = refused.reason if refused.reason in STATUS else "internal"
        count = max(0, refused.requests)
        self.metrics.count_refusals(tenant, reason, count, is_done=refused.is_done)

    def observe_times(self, times: Times) -> None:
        tenant = times.tenant if times.tenant in self._infos else ""
        self.metrics.observe_times(times.kind, tenant, times.counts, times.seconds)

    def ask(self, what: str) -> bytes:
        answers = {"metrics": self.render_metrics, "status": self._status}
        if what == "timeline":
            self.collect()
            return self.timeline.render(self.attacher.describe_signature)
        return answers[what]()

    # --- what it shows -------------------------------------------------------------------------

    def collect(self) -> None:
        """Move the core's new records to metrics and timeline."""
        with self._collecting:
            finished, requests = self.runtime.call(self.runtime.core.trace.take).result()
            launches = [describe(flight) for flight in finished]
            self.metrics.observe(launches, requests, self.executor.malformed)
            self.timeline.add(launches, requests)

    def render_metrics(self) -> bytes:
        self.collect()
        return self.metrics.render()

    def _levels(self) -> Levels:
        stats = self.runtime.core.stats()
        return Levels(
            window_requests=stats.requests_open,
            tenants_alone=len(stats.alone),
            longest_launch_ns=stats.longest_ns,
            weight_bytes_held=self.device.bytes_held,
            weight_bytes_saved=self.device.bytes_saved,
            tenants_by_state=Counter(info.state for info in self._infos.values()),
            native_kernels=self.forge.states() if self.forge else {},
        )

    def _status(self) -> bytes:
        self.collect()
        stats = self.runtime.call(self.runtime.core.stats).result()
        return json.dumps(
            {
                "pid": os.getpid(),
                "device": self.device.name,
                "policy": stats.policy,
                "tenants_alone": stats.alone,
                "longest_launch_ms": stats.longest_ns / MS,
                "requests_open": stats.requests_open,
                "weight_bytes": self.device.bytes_held,
                "weight_saved_bytes": self.device.bytes_saved,
                "metrics_port": self.metrics_port,
                "native_kernels": self.forge.states() if self.forge else None,
                "note": "; ".join(filter(None, (self._note, self._own_note))),
                "outcomes": {outcome.value: n for outcome, n in stats.outcomes.items()},
                "tenants": {info.name: [info.state, info.reason] for info in self.directory()},
                "figures": self.metrics.summarize(),
            }
        ).encode()


def _find_fault(folder: Path) -> str:
    """Why nothing can be written there; empty: it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextmanager
def _naming_key(key: str) -> Iterator[None]:
    """What goes wrong with a file has its key before it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise OSError(f"{key}: {error}") from None


class _Channel:
    """The listening sockets, on the runtime's loop."""

    def __init__(self, host: SchedulerHost, settings: AppSettings, run_dir: str) -> None:
        self._host = host
        endpoints = [Endpoint(path=str(Path(run_dir) / "gpu0.sock"))]
        scheduler = settings.scheduler
        if scheduler.tcp_port is not None and scheduler.secret_file is not None:
            with _naming_key("scheduler.secret_file"):
                secret = Path(scheduler.secret_file).read_text().strip()
            endpoints.append(Endpoint(host="0.0.0.0", port=scheduler.tcp_port, secret=secret))
        self._servers = [
            ChannelServer(endpoint, Door(host, index, len(endpoints)))
            for index, endpoint in enumerate(endpoints)
        ]
        self.endpoint = endpoints[0]

    def start(self) -> None:
        self._wait(self._listen())

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._host.runtime.loop).result()

    async def _listen(self) -> None:
        for server in self._servers:
            await server.start()
        self._collector = asyncio.ensure_future(self._collect_forever())

    async def _collect_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(COLLECT_SECONDS)
            await loop.run_in_executor(None, self._host.collect)

    def push_directory(self) -> None:
        for server in self._servers:
            server.push_directory()

    def stop(self) -> None:
        self._wait(self._close())

    async def _close(self) -> None:
        self._collector.cancel()
        await asyncio.gather(self._collector, return_exceptions=True)
        for server in self._servers:
            await server.stop()
        await asyncio.get_running_loop().shutdown_default_executor()
