"""The settings a platform engineer writes, as typed data. Unknown keys are errors with their path.

The same model is the argument of the Serve application builder and of `coissue validate`. Types are
strict (true is no integer), every number has two bounds and none is NaN. Times in milliseconds and
sizes in MiB are for people; the `*_ns` and `*_bytes` properties are for the code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

MS = 1_000_000
MIB = 1024 * 1024
#: Slower than this (2 Mbit/s) a large body is given up.
BODY_BYTES_PER_SECOND = MIB // 4
IMPORTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")


def _check_imported(text: str) -> str:
    if not IMPORTED.fullmatch(text):
        raise ValueError(f"must look like 'pkg.mod:name', not {text!r}")
    return text


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a tenant name: 1 to 64 of a-z 0-9 . _ -, "
            "starting and ending with a letter or digit"
        )
    return name


def _check_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a NUL character cannot be in a path")
    return path


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


FilePath = Annotated[str, AfterValidator(_check_path)]
GivenPath = Annotated[str, Field(min_length=1), AfterValidator(_check_path)]


class DeviceSettings(Settings):
    """Which device the scheduler owns."""

    kind: Literal["cpu"] = "cpu"
    #: Threads of one CPU launch.
    threads: int = Field(default=1, ge=1, le=256)
    #: Weights, activations and workspaces together; at most 16 TiB.
    memory_mib: int = Field(default=4096, ge=64, le=16_777_216)
    #: Memory-bound ops as generated C++, built in the background where a compiler is there. An
    #: answer may differ in its last bits before and after; exact tenants keep the op table.
    native_kernels: bool = True
    #: Measured tables and compiled kernels are kept here; empty: `~/.cache/coissue`.
    cache: FilePath = ""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def cache_dir(self) -> Path:
        return Path(self.cache or Path.home() / ".cache" / "coissue")


class HealthSettings(Settings):
    """When a scheduler that does not answer is killed and started again."""

    #: Control asks it every second, and waits so long for an answer.
    ping_timeout_ms: float = Field(default=5_000, ge=10, le=600_000)
    #: So many answers missed in a row are the end of it.
    misses: int = Field(default=3, ge=1, le=1000)
    #: From its start to its first answer.
    start_timeout_ms: float = Field(default=180_000, ge=1_000, le=3_600_000)
    #: A scheduler that no control asks for so long ends itself.
    orphan_timeout_ms: float = Field(default=60_000, ge=1_000, le=3_600_000)


class SchedulerSettings(Settings):
    #: The product; the others are baselines to compare it with.
    policy: Literal["space_time", "time_only", "space_only", "batch_per_model", "fifo"] = (
        "space_time"
    )
    #: Launches beside each other, each on a thread of its own; more than one for space_only alone.
    slots: int = Field(default=1, ge=1, le=64)
    #: No launch is predicted longer than this, unless it is one row of one request.
    preemption_bound_ms: float = Field(default=10.0, ge=0.001, le=10_000)
    #: Longest that a kernel waits for partners while other work runs; 0: not at all.
    hold_ms: float = Field(default=10.0, ge=0, le=10_000)
    #: How long after its fair time a request may wait while others with earlier deadlines go first.
    fair_window_ms: float = Field(default=100.0, ge=0, le=600_000)
    #: Most admitted requests at once.
    window: int = Field(default=1024, ge=1, le=65_536)
    #: Reject at once what is predicted to finish after its deadline.
    admission: bool = True
    #: Prometheus endpoint of the scheduler on 127.0.0.1; 0: a free port; null: none of its own.
    metrics_port: int | None = Field(default=9464, ge=0, le=65_535)
    #: Listen for replicas of other hosts here; null: Unix socket only.
    tcp_port: int | None = Field(default=None, ge=0, le=65_535)
    #: File with the secret that TCP replicas must know.
    secret_file: GivenPath | None = None
    #: Every event and command goes to this file (anew at each start), to be replayed; costs time.
    record_to: GivenPath | None = None
    health: HealthSettings = HealthSettings()

    @model_validator(mode="after")
    def _check_together(self) -> SchedulerSettings:
        if self.slots > 1 and self.policy != "space_only":
            raise ValueError(f"slots: {self.slots} with policy {self.policy}, allowed: 1")
        if self.tcp_port is not None and self.secret_file is None:
            raise ValueError("tcp_port needs secret_file: TCP without a secret is refused")
        return self

    @property
    def join_bound_ns(self) -> int:
        """Of a joined kernel at a small request: several have room under the other bound."""
        return round(self.preemption_bound_ms * MS) // 2


class SloClass(Settings):
    """Deadline and objective shared by the tenants that name the class."""

    deadline_ms: float = Field(ge=0.001, le=600_000)
    #: Share of requests that must meet the deadline.
    objective: float = Field(default=0.99, gt=0, lt=1)
    priority: int = Field(default=1, ge=1, le=16)

    @property
    def deadline_ns(self) -> int:
        return round(self.deadline_ms * MS)


class ModelSettings(Settings):
    """Where a model comes from: exactly one of `factory`, `program`, `checkpoint`."""

    #: `pkg.mod:callable` returning (module, {input name: sample tensor}); see capture/sources.py.
    factory: Annotated[str, AfterValidator(_check_imported)] | None = None
    #: A file saved by `torch.export.save`.
    program: FilePath | None = None
    #: A safetensors file, with `architecture` naming a known one.
    checkpoint: FilePath | None = None
    architecture: Literal["bert", "minilm", "mlp", "resnet18"] | None = None
    #: Arguments of the factory or the architecture.
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    #: Any text. Another one captures again, when all that changed is a file the model reads.
    revision: str = ""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        given = [key for key in ("factory", "program", "checkpoint") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                "exactly one of factory, program, checkpoint is needed, not "
                + (" and ".join(given) if given else "none")
            )
        if (self.checkpoint is None) != (self.architecture is None):
            raise ValueError("checkpoint and architecture go together")
        return self


class Limits(Settings):
    """What one tenant may use."""

    in_flight: int = Field(default=256, ge=1, le=65_536)
    #: Largest R of one request.
    rows: int = Field(default=64, ge=1, le=65_536)
    #: Largest T of one request.
    tokens: int = Field(default=512, ge=1, le=131_072)


class HandlerSettings(Settings):
    """Pre- and postprocessing. Built-in names run in the shared pool; `pkg.mod:Class` needs a
    dedicated deployment."""

    use: Annotated[str, AfterValidator(lambda use: _check_imported(use) if ":" in use else use)]
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    #: Any text. Another one loads it again, when all that changed is its code or a file it reads.
    revision: str = ""

    @property
    def is_builtin(self) -> bool:
        return ":" not in self.use


class TenantSettings(Settings):
    name: Annotated[str, AfterValidator(_check_name)]
    model: ModelSettings
    slo: str
    share: float = Field(default=1.0, gt=0, le=1000)
    limits: Limits = Limits()
    handler: HandlerSettings | None = None
    isolation: Literal["shared", "dedicated"] = "shared"
    #: What to do with NaN or Inf in a float input.
    nan: Literal["allow", "reject"] = "allow"
    #: The same row gives the same bits whatever else runs, at the cost of speed; see
    #: docs/decisions/009-exact-mode.md.
    exact: bool = False

    @model_validator(mode="after")
    def _own_code_is_dedicated(self) -> TenantSettings:
        if self.handler and not self.handler.is_builtin and self.isolation == "shared":
            raise ValueError(
                f"handler.use {self.handler.use!r} is the tenant's own code: "
                "it needs isolation: dedicated"
            )
        if self.isolation == "dedicated" and self.handler is None:
            raise ValueError("isolation dedicated is for a tenant's own code: handler is missing")
        return self


class PoolSettings(Settings):
    """The shared replica pool."""

    replicas: int = Field(default=1, ge=1, le=256)
    #: Requests one replica works on at once.
    ongoing_requests: int = Field(default=512, ge=1, le=65_536)
    #: Largest accepted HTTP body.
    body_mib: int = Field(default=64, ge=1, le=4096)
    #: A body has so long to come, and a second more for each 1/4 MiB of it; then 408.
    body_seconds: float = Field(default=10.0, ge=0.1, le=3600)
    #: Bodies of one replica together, until they are answered; beyond it 429.
    held_mib: int = Field(default=512, ge=1, le=65_536)

    @property
    def body_bytes(self) -> int:
        return self.body_mib * MIB

    @property
    def held_bytes(self) -> int:
        return max(self.held_mib, self.body_mib) * MIB


class CaptureSettings(Settings):
    """Bringing models in."""

    #: A model whose capture takes longer is failed.
    seconds: float = Field(default=180.0, ge=1, le=3600)
    #: One that takes longer than this no longer keeps the others waiting.
    turn_seconds: float = Field(default=15.0, ge=0.1, le=3600)


class AppSettings(Settings):
    """`args` of the Serve application `coissue.deployments.app:build`."""

    device: DeviceSettings = DeviceSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    pool: PoolSettings = PoolSettings()
    capture: CaptureSettings = CaptureSettings()
    slo_classes: dict[str, SloClass]
    #: Not strict: a YAML has lists only.
    tenants: tuple[TenantSettings, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _names_fit(self) -> AppSettings:
        wrong = find_misfits([(t.name, t.slo) for t in self.tenants], self.slo_classes)
        if wrong:
            raise ValueError("\n".join(wrong))
        return self


def find_misfits(
    tenants: Sequence[tuple[str | None, str | None]], classes: Collection[str]
) -> list[str]:
    """What is wrong between tenants, of which name and SLO class are given, with the key first."""
    seen: set[str | None] = {None}
    wrong = []
    for index, (name, slo) in enumerate(tenants):
        if name is not None and name in seen:
            wrong.append(f"tenants.{index}.name: {name!r} is there twice")
        seen.add(name)
        if slo is not None and slo not in classes:
            wrong.append(
                f"tenants.{index}.slo: no class {slo!r} in slo_classes "
                f"(there are: {', '.join(sorted(classes))})"
            )
    return wrong
