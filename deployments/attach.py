"""From an artifact to a program that may be served: check, load, lower, plan, measure, prove.

Nothing of the tenant's code runs here; the artifact is data and all of it is checked. Work that
needs the device runs on the runtime's thread in pieces no longer than a launch, between launches.
A failure leaves the device as it was before, and says in one sentence what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from coissue.deployments.capture.artifact import Artifact, CaptureError, Reference, find_difference
from coissue.deployments.changes import adjust_attached
from coissue.deployments.channel.frames import PortInfo, TenantInfo
from coissue.deployments.costs import Costs
from coissue.deployments.executor import ServedProgram
from coissue.deployments.lookups import find_bounds
from coissue.deployments.settings import SloClass, TenantSettings
from coissue.kernels.cpu.border import Arrival, Border, Reader, enter, to_tensor
from coissue.kernels.cpu.compile import Plan
from coissue.kernels.cpu.device import CpuDevice, DeviceSegment
from coissue.kernels.cpu.measure import measure
from coissue.kernels.cpu.stitched import Steps
from coissue.kernels.cpu.store import DeviceMemoryError
from coissue.kernels.ir import Port, Program, Type, Weight
from coissue.kernels.lowered import Kernel, Lowered, describe_kernel
from coissue.kernels.passes.link import cut, guess_times
from coissue.kernels.passes.pipeline import lower
from coissue.kernels.spec import SpecError, bind_sizes, check_program
from coissue.scheduler.messages import KernelIndex, KernelSpec, SignatureId, TenantSpec, WeightsId
from coissue.scheduler.runtime import Runtime

DONE: Final = object()
#: Stands for the program of a tenant that is not attached.
EMPTY: Final = Program("", (), (), (), (), (), rows_limit=1)


class AttachError(Exception):
    """The tenant cannot be served; a sentence for its team."""


@dataclass(frozen=True, slots=True)
class Attached:
    """What is kept of one attached tenant."""

    settings: TenantSettings
    slo: SloClass
    version: int
    #: As `lower` gave it; joined anew whenever a tenant comes.
    lowered: Lowered
    #: Of its weights, each held once for it.
    digests: tuple[str, ...]
    tolerance: float
    references: tuple[Reference, ...]


@final
class Attacher:
    """Keeps all attached programs, because what is joined depends on all of them.

    Calls must not overlap; the host holds its lock around them.
    """

    def __init__(
        self, device: CpuDevice, costs: Costs, runtime: Runtime, join_bound_ns: int
    ) -> None:
        self._device = device
        self._costs = costs
        self._runtime = runtime
        self._join_bound_ns = join_bound_ns
        self._attached: dict[str, Attached] = {}
        self._served: dict[str, ServedProgram] = {}
        #: In words, for the timeline.
        self._names: dict[SignatureId, str] = {}
        #: Signature -> the plan that was measured, with the steps it had then.
        self._measured: dict[str, tuple[Plan, Steps]] = {}
        #: The signature that is being measured.
        self._unfinished = ""

    def attach(
        self, tenant: TenantSettings, slo: SloClass, version: int, folder: Path
    ) -> list[ServedProgram]:
        """All programs that are new or joined differently now. Raises `AttachError`."""
        artifact = load_artifact(folder, lambda w, type_: self._device.holds(w.digest, type_))
        digests = tuple(dict.fromkeys(weight.digest for weight in artifact.program.weights))
        before = self._attached.get(tenant.name)
        try:
            fresh = {digest: to_tensor(array) for digest, array in artifact.weights.items()}
            held = [digest for digest in digests if digest not in fresh]
            self._on_device(lambda: self._device.load_weights(fresh, held))
        except DeviceMemoryError as error:
            raise AttachError(f"device.memory_mib: {error}") from None
        try:
            self._attached[tenant.name] = Attached(
                tenant, slo, version, lower(artifact.program, exact=tenant.exact), digests,
                float(artifact.meta["tolerance"]), artifact.references,
            )  # fmt: skip
            changed = self._rejoin()
            own = next(program for program in changed if program.spec.name == tenant.name)
            self._prove(own, self._attached[tenant.name])
        except BaseException:
            if before is None:
                self._attached.pop(tenant.name, None)
            else:
                self._attached[tenant.name] = before
            self._on_device(lambda: self._device.drop_weights(digests))
            raise
        if before is not None:
            self._drop(before)
        self._served |= {program.spec.name: program for program in changed}
        return changed

    def adjust(self, tenant: TenantSettings, slo: SloClass) -> ServedProgram | None:
        """The attached program under changed settings; None: nothing changed for it."""
        before = self._attached[tenant.name]
        tenant = adjust_attached(before.settings, tenant)
        if (tenant, slo) == (before.settings, before.slo):
            return None
        self._attached[tenant.name] = replace(before, settings=tenant, slo=slo)
        served = self._served[tenant.name]
        limit = tenant.limits.in_flight
        spec = replace(
            served.spec, share=tenant.share, in_flight_limit=limit, priority=slo.priority
        )
        self._served[tenant.name] = replace(served, spec=spec)
        return self._served[tenant.name]

    def settings(self, name: str) -> TenantSettings:
        """Those that the attached tenant is served under."""
        return self._attached[name].settings

    def detach(self, name: str) -> None:
        """Forget the tenant; its weights go when the last request that uses them is done."""
        attached = self._attached.pop(name, None)
        self._served.pop(name, None)
        if attached is not None:
            self._drop(attached)

    def _drop(self, attached: Attached) -> None:
        self._on_device(lambda: self._device.drop_weights(attached.digests))

    def _on_device(self, function: Callable[[], Any]) -> Any:
        return self._runtime.call(function).result()

    # --- joining, planning, measuring ----------------------------------------------------------

    def _rejoin(self) -> list[ServedProgram]:
        """Join all programs again; those whose kernels came out differently, planned anew."""
        joined = cut(
            {name: attached.lowered for name, attached in self._attached.items()},
            guess_times([attached.lowered for attached in self._attached.values()]),
            self._join_bound_ns,
        )
        return [
            self._serve(name, lowered)
            for name, lowered in joined.items()
            if self._is_changed(name, lowered)
        ]

    def _is_changed(self, name: str, lowered: Lowered) -> bool:
        served = self._served.get(name)
        return (
            served is None
            or served.version != self._attached[name].version
            or [k.signature for k in served.lowered.kernels]
            != [k.signature for k in lowered.kernels]
        )

    def _serve(self, name: str, lowered: Lowered) -> ServedProgram:
        attached = self._attached[name]
        kernels = tuple(
            self._on_device(partial(self._device.bind, lowered, index))
            for index in range(len(lowered.kernels))
        )
        for index, kernel in enumerate(lowered.kernels):
            self._measure(lowered, index, kernel, kernels[index].plan)
        specs = tuple(
            KernelSpec(
                self._costs.intern(kernel.signature),
                WeightsId(bound.weights.number),
                tuple(KernelIndex(producer) for producer in producers),
                kernel.per_token,
                kernel.splittable,
            )
            for kernel, bound, producers in zip(
                lowered.kernels, kernels, lowered.producers, strict=True
            )
        )
        tenant = attached.settings
        spec = TenantSpec(name, specs, tenant.share, tenant.limits.in_flight, attached.slo.priority)
        return ServedProgram(spec, attached.version, lowered, kernels, Border(lowered))

    def _measure(self, lowered: Lowered, index: int, kernel: Kernel, plan: Plan) -> None:
        signature = self._costs.intern(kernel.signature)
        self._names.setdefault(signature, describe_kernel(kernel))
        if kernel.signature in self._costs.table:
            return
        self._measured[kernel.signature] = plan, plan.steps
        self._unfinished = kernel.signature
        steps = measure(self._device, self._costs.table, lowered, index)
        try:
            while self._on_device(lambda: next(steps, DONE)) is not DONE:
                pass
        except BaseException:
            self._costs.table.forget(kernel.signature)
            raise
        self._unfinished = ""

    def forget_outdated(self) -> None:
        """Drop the costs of a kernel that is being measured, and of kernels that got native forms
        since they were: while serving they are corrected, but the next process should measure what
        it will run."""
        self._costs.table.forget(self._unfinished)
        for signature, (plan, steps) in self._measured.items():
            if plan.steps is not steps:
                self._costs.table.forget(signature)

    # --- references ----------------------------------------------------------------------------

    def _prove(self, program: ServedProgram, attached: Attached) -> None:
        """The references through the device: each alone, then all in the same launches."""
        cases = attached.references
        for group in [*([case] for case in cases), list(cases)]:
            for case, outputs in zip(group, self._run(program, group), strict=True):
                wrong = find_difference(outputs, case.outputs, attached.tolerance)
                if wrong:
                    how = "alone" if len(group) == 1 else "coalesced"
                    number = next(i for i, own in enumerate(cases) if own is case)
                    raise AttachError(f"reference {number}, run {how}: {wrong}")

    def _run(self, program: ServedProgram, cases: list[Reference]) -> list[dict[str, np.ndarray]]:
        border = program.border
        sizes = [size_of(program.lowered.program, case.inputs) for case in cases]
        buffers = enter(
            [Arrival(border, case.inputs, *size) for case, size in zip(cases, sizes, strict=True)]
        )
        for bound in program.kernels:
            segments = [
                DeviceSegment(bound, *size, own) for size, own in zip(sizes, buffers, strict=True)
            ]
            self._on_device(partial(self._device.run, segments))
        names = [port.name for port in border.outputs]
        return [
            dict(zip(names, Reader().read(border, own, *size), strict=True))
            for size, own in zip(sizes, buffers, strict=True)
        ]

    # --- what others ask -----------------------------------------------------------------------

    def describe_signature(self, signature: SignatureId) -> str:
        return self._names.get(signature, f"signature {signature}")


def load_artifact(folder: Path, held: Callable[[Weight, Type], bool]) -> Artifact:
    try:
        artifact = Artifact.load(folder, held)
        check_program(artifact.program)
    except (CaptureError, SpecError) as error:
        raise AttachError(str(error)) from None
    return artifact


def size_of(program: Program, inputs: Mapping[str, np.ndarray]) -> tuple[int, int]:
    types = [program.types[port.value] for port in program.inputs]
    return bind_sizes(types, [inputs[port.name].shape for port in program.inputs])


def describe_tenant(
    tenant: TenantSettings, slo: SloClass, state: Any, reason: str, program: ServedProgram | None
) -> TenantInfo:
    """What replicas learn of a tenant."""
    model = program.lowered.program if program else EMPTY
    return TenantInfo(
        name=tenant.name, version=program.version if program else 0, state=state, reason=reason,
        inputs=describe_ports(model, model.inputs), outputs=describe_ports(model, model.outputs),
        rows_limit=min(tenant.limits.rows, model.rows_limit),
        tokens_limit=min(tenant.limits.tokens, model.tokens_limit),
        slo_class=tenant.slo, deadline_ns=slo.deadline_ns, objective=slo.objective,
        priority=slo.priority, in_flight_limit=tenant.limits.in_flight,
        share=tenant.share, nan=tenant.nan,
        handler=tenant.handler.model_dump_json() if tenant.handler else "",
    )  # fmt: skip


def describe_ports(program: Program, ports: tuple[Port, ...]) -> tuple[PortInfo, ...]:
    bounds, types = find_bounds(program), program.types
    return tuple(
        PortInfo(p.name, types[p.value].dtype, types[p.value].shape, bounds.get(p.value, 0))
        for p in ports
    )
