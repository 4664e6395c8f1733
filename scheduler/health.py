"""Health: tenants that slow their groups run alone for a while, and those that always fail are out.

NOTE. The papers evict degraded workers without a rule (O7, T6); this is ours (C15). *Pace* is the
logarithm of measured over predicted time of groups, of late: for each signature over its launches,
for each tenant over those it was in, above the signature's. A launch is as slow as its slowest
member, so a quick one counts for more, the less the signature's spread (else it is luck), and one
quicker by twice the spread halves the count of all members. A tenant whose pace is above `SLOW` for
`PATIENCE` launches, or half as many at twice `SLOW`, leaves the groups: its kernels share launches
with its own requests only. A slow launch with such a tenant in it is held against the slowest one
only (bad luck with partners would be enough). No launch with one counts for the signature, whose
pace would hide the milder ones. After `ALONE_NS`, twice as long with each strike, it comes back on
probation, and has a clean sheet after `PROBATION` launches without a strike. At most a quarter of
the tenants is out at a time: a slow device does not take the groups apart.

A request that fails alone the second time is its tenant's failure, unless its input is to blame.
After `FAILURES_ALONE` such in a row the tenant leaves the groups likewise; after `FAILURES_OUT` it
is put out of service until it is attached anew. One request that completes clears the count.

Limits. A tenant in almost every launch of its signature cannot be told from its partners. One that
is slow in only half of its launches stays; one that is 1.5 times slower may.
"""

from __future__ import annotations

from math import log2
from typing import Final, final

from coissue.scheduler.coalesce import Batch
from coissue.scheduler.messages import SignatureId
from coissue.scheduler.ports import MS
from coissue.scheduler.window import Tenant, Window

#: Weight of the newest launch in a pace; in a tenant's, of a quick one at spreads up to `QUIET`.
NEWEST: Final = 1 / 16
QUICK: Final = 1 / 4
QUIET: Final = 0.15
#: In powers of two: about 1.3 times slower.
SLOW: Final = 0.4
PATIENCE: Final = 32
#: After so many slow launches of a signature in a row it is the device that is slow.
WHOLE: Final = 8
PROBATION: Final = 256
ALONE_NS: Final = 1000 * MS
STRIKES_MAX: Final = 6
FAILURES_ALONE: Final = 3
FAILURES_OUT: Final = 20
#: A single launch counts as at most so many powers of two too slow or too fast.
CLIP: Final = 3.0


@final
class Record:
    """What health knows of one tenant; of one signature, the first three."""

    __slots__ = ("alone_until_ns", "pace", "probation", "slow_count", "spread", "strikes")

    def __init__(self) -> None:
        #: A tenant's is above that of its signatures.
        self.pace = 0.0
        #: Launches in a row: a signature's slow ones; with a tenant too slow, each by how much.
        self.slow_count = 0
        #: Of a signature: of quicker launches, as slower ones tell of stragglers, not of noise.
        self.spread = 0.0
        self.strikes = 0
        #: Launches left until its strikes are forgiven.
        self.probation = 0
        self.alone_until_ns = 0

    def observe(self, above: float, spread: float) -> bool:
        """A launch with the tenant in it. True: it was slow for long enough."""
        high = QUICK * QUIET / spread if spread > QUIET else QUICK
        self.pace += (high if high > NEWEST and above < self.pace else NEWEST) * (above - self.pace)
        if self.probation:
            self.probation -= 1
            if not self.probation:
                self.strikes = 0
        if self.pace <= SLOW:
            self.slow_count = 0
            return False
        if above <= SLOW / 2 and above <= self.pace - 2 * spread:
            self.slow_count //= 2
            return False
        self.slow_count += int(self.pace / SLOW)
        return self.slow_count >= PATIENCE


@final
class Health:
    """Watches launches and failures; sets `Tenant.alone` and `Tenant.is_out`."""

    __slots__ = ("_records", "_usual", "_window", "alone")

    def __init__(self, window: Window) -> None:
        self._window = window
        self._usual: dict[SignatureId, Record] = {}
        self._records: dict[str, Record] = {}
        #: Tenants out of the groups, by name.
        self.alone: dict[str, Tenant] = {}

    def landed(self, flight: Batch, measured_ns: int, now_ns: int) -> None:
        """A launch came back. Those of one member tell nothing of who slows others."""
        if self.alone:
            self._let_back(now_ns)
        if len(flight.members) < 2 or flight.members[0].request.tenant.alone:
            return
        ratio = max(measured_ns, 1) / max(flight.predicted_ns, 1)
        signature = flight.signature
        usual = self._usual.get(signature) or self._usual.setdefault(signature, Record())
        above = min(max(log2(ratio), -CLIP), CLIP) - usual.pace
        usual.slow_count = usual.slow_count + 1 if above > SLOW else 0
        if usual.slow_count > WHOLE:
            usual.pace += NEWEST * above
            return
        slowest = SLOW
        records: dict[Tenant, Record] = {}
        for kernel in flight.members:
            tenant = kernel.request.tenant
            name = tenant.name
            record = self._records.get(name) or self._records.setdefault(name, Record())
            records[tenant] = record
            slowest = record.pace if record.pace > slowest else slowest
        if slowest <= SLOW:
            usual.pace += NEWEST * above
            if above < 0:
                usual.spread -= NEWEST * (above + usual.spread)
        explained = above > 0 and slowest > SLOW
        for tenant, record in records.items():
            if (not explained or record.pace == slowest) and record.observe(above, usual.spread):
                self._send_out(tenant, record, now_ns)

    def _send_out(self, tenant: Tenant, record: Record, now_ns: int) -> None:
        most = max(1, len(self._window.tenants) // 4)
        if tenant.alone or len(self.alone) >= most:
            return
        record.alone_until_ns = now_ns + (ALONE_NS << record.strikes)
        record.strikes = min(record.strikes + 1, STRIKES_MAX)
        tenant.alone = True
        self.alone[tenant.name] = tenant

    def _let_back(self, now_ns: int) -> None:
        """Who was alone for long enough is back, still suspected: else partners would be blamed."""
        for name, tenant in list(self.alone.items()):
            record = self._records[name]
            if record.alone_until_ns <= now_ns:
                tenant.alone = False
                record.pace = SLOW
                record.slow_count = 0
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
