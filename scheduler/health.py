"""Health: tenants that slow their groups run alone for a while, and those that always fail are out.

NOTE. The papers evict degraded workers without a rule (O7, T6); this is ours (C15). *Pace* is the
logarithm of measured over predicted time of groups, of late: for each tenant over the launches it
was in, for each signature over all. A tenant whose pace is `SLOW` above its signature's for
`PATIENCE` launches in a row leaves the groups: its kernels share launches with its own requests
only. A slow launch with such a tenant in it is explained by the slowest one and held against nobody
else: where more are slow than may be out, bad luck with partners would be enough. After `ALONE_NS`,
twice as long with each strike, it comes back on probation, and has a clean sheet once it has been
in `PROBATION` launches without another strike. At most a quarter of the attached tenants is out at
a time, so that a slow device does not take the groups apart.

A request that fails alone the second time is its tenant's failure, unless its input is to blame.
After `FAILURES_ALONE` such in a row the tenant leaves the groups likewise; after `FAILURES_OUT` it
is put out of service until it is attached anew. One request that completes clears the count.

Limits. A tenant that is in almost every launch of its signature cannot be told from its partners.
"""

from __future__ import annotations

from math import log2
from typing import Final, final

from coissue.scheduler.coalesce import Batch
from coissue.scheduler.messages import SignatureId
from coissue.scheduler.ports import MS
from coissue.scheduler.window import Tenant, Window

#: Weight of the newest launch in a pace.
NEWEST: Final = 1 / 16
#: In powers of two: about 1.3 times slower.
SLOW: Final = 0.4
PATIENCE: Final = 32
PROBATION: Final = 256
ALONE_NS: Final = 1000 * MS
STRIKES_MAX: Final = 6
FAILURES_ALONE: Final = 3
FAILURES_OUT: Final = 20
#: A single launch counts as at most so many powers of two too slow or too fast.
CLIP: Final = 3.0


@final
class Record:
    """What health knows of one tenant."""

    __slots__ = ("alone_until_ns", "pace", "probation", "slow_count", "strikes")

    def __init__(self) -> None:
        #: Above that of its signatures.
        self.pace = 0.0
        #: Launches in a row in which its pace was too slow.
        self.slow_count = 0
        self.strikes = 0
        #: Launches left until its strikes are forgiven.
        self.probation = 0
        self.alone_until_ns = 0


@final
class Health:
    """Watches launches and failures; sets `Tenant.alone` and `Tenant.is_out`."""

    __slots__ = ("_paces", "_records", "_window", "alone")

    def __init__(self, window: Window) -> None:
        self._window = window
        self._paces: dict[SignatureId, float] = {}
        self._records: dict[str, Record] = {}
        #: Tenants out of the groups, by name.
        self.alone: dict[str, Tenant] = {}

    def landed(self, flight: Batch, measured_ns: int, now_ns: int) -> None:
        """A launch came back. Those of one member tell nothing of who slows others."""
        if self.alone:
            self._let_back(now_ns)
        if len(flight.members) < 2:
            return
        signature = flight.signature
        ratio = max(measured_ns, 1) / max(flight.predicted_ns, 1)
        pace = min(max(log2(ratio), -CLIP), CLIP)
        usual = self._paces.get(signature, 0.0)
        self._paces[signature] = usual + NEWEST * (pace - usual)
        records: dict[Tenant, Record] = {}
        for kernel in flight.members:
            tenant = kernel.request.tenant
            if tenant.name not in self._records:
                self._records[tenant.name] = Record()
            records[tenant] = self._records[tenant.name]
        slowest = max(record.pace for record in records.values())
        for tenant, record in records.items():
            if pace <= usual or slowest <= SLOW or record.pace == slowest:
                self._observe(tenant, record, pace - usual, now_ns)

    def _observe(self, tenant: Tenant, record: Record, pace: float, now_ns: int) -> None:
        record.pace += NEWEST * (pace - record.pace)
        if record.probation:
            record.probation -= 1
            if not record.probation:
                record.strikes = 0
        if record.pace <= SLOW:
            record.slow_count = 0
            return
        record.slow_count += 1
        if record.slow_count >= PATIENCE:
            self._send_out(tenant, record, now_ns)

    def _send_out(self, tenant: Tenant, record: Record, now_ns: int) -> None:
        most = max(1, len(self._window.tenants) // 4)
        if tenant.alone or len(self.alone) >= most:
            return
        record.alone_until_ns = now_ns + (ALONE_NS << record.strikes)
        record.strikes = min(record.strikes + 1, STRIKES_MAX)
        record.slow_count = 0
        tenant.alone = True
        self.alone[tenant.name] = tenant

    def _let_back(self, now_ns: int) -> None:
        """Whoever has been alone for long enough comes back on probation."""
        for name, tenant in list(self.alone.items()):
            record = self._records[name]
            if record.alone_until_ns <= now_ns:
                tenant.alone = False
                record.pace = 0.0
                record.probation = PROBATION
                del self.alone[name]

    def failed(self, tenant: Tenant, now_ns: int) -> bool:
        """A request failed, and not by its input. True: the tenant is to be put out now."""
        tenant.failures += 1
        if tenant.failures >= FAILURES_ALONE:
            self._send_out(tenant, self._records.setdefault(tenant.name, Record()), now_ns)
        if tenant.failures < FAILURES_OUT or tenant.is_out:
            return False
        tenant.is_out = True
        return True

    def forget(self, name: str) -> None:
        """A version of the tenant is attached, or the name is gone: a clean sheet."""
        self._records.pop(name, None)
        tenant = self.alone.pop(name, None) or self._window.tenants.get(name)
        if tenant is not None:
            tenant.alone = tenant.is_out = False
            tenant.failures = 0
