"""Programs as the scheduler uses them, and what is predicted for them by request size.

NOTE. Three predictions per kernel carry all decisions. *own*: its launch alone. *share*: its part
of a launch of `GROUP` equal members, which is what it costs where others travel with it. *tail*:
own times along the longest path from this kernel to the end; deadline - tail is the latest start,
and that never changes while a request lives, so slack order needs no re-sorting.
"""

from __future__ import annotations

from typing import Final, final

from coissue.scheduler.messages import KernelIndex, SignatureId, TenantSpec
from coissue.scheduler.ports import CostView, InvariantViolation

#: Members of the launch that `share_ns` is taken from.
GROUP: Final = 16
#: A profile older than this is predicted anew, so that corrections of the costs get through.
PROFILE_AGE_NS: Final = 1_000_000_000
#: Profiles kept per program.
PROFILES_LIMIT: Final = 1024


@final
class Profile:
    """Predictions for one program at one request size, by kernel index."""

    __slots__ = ("made_ns", "own_ns", "path_ns", "share_ns", "tail_ns")

    def __init__(
        self, own_ns: list[int], share_ns: list[int], tail_ns: list[int], made_ns: int
    ) -> None:
        self.own_ns = own_ns
        self.share_ns = share_ns
        self.tail_ns = tail_ns
        #: The longest path: what a request needs at least.
        self.path_ns = max(tail_ns, default=0)
        self.made_ns = made_ns


#: All of a kernel but its weights.
Part = tuple[SignatureId, tuple[KernelIndex, ...], bool, bool]


def parts_of(spec: TenantSpec) -> tuple[Part, ...]:
    """What its program is known by: the same for tenants that differ in weights only."""
    return tuple((k.signature, k.producers, k.per_token, k.splittable) for k in spec.kernels)


@final
class Program:
    """Kernels and what follows from them, shared by all versions of tenants that differ in weights
    only: predictions are made once for all of them. Requests in flight keep the one they came with.
    """

    __slots__ = (
        "_bound_ns", "_profiles", "parts", "producer_counts", "roots", "signatures", "successors",
        "users",
    )  # fmt: skip

    def __init__(self, parts: tuple[Part, ...], bound_ns: int) -> None:
        """`bound_ns`: kernels that take longer go in parts of rows, if they can."""
        self.parts = parts
        self._bound_ns = bound_ns
        #: Versions attached that have it.
        self.users = 0
        successors: list[list[int]] = [[] for _ in parts]
        waits = [tuple(dict.fromkeys(producers)) for _, producers, _, _ in parts]
        for index, producers in enumerate(waits):
            for producer in producers:
                if not 0 <= producer < index:
                    raise InvariantViolation(
                        "program order", f"kernel {index} waits for {producer}"
                    )
                successors[producer].append(index)
        self.successors = tuple(map(tuple, successors))
        self.producer_counts = tuple(map(len, waits))
        self.roots = tuple(i for i, count in enumerate(self.producer_counts) if count == 0)
        self.signatures = tuple(signature for signature, _, _, _ in parts)
        #: (rows, tokens) rounded up -> predictions; oldest first, at most PROFILES_LIMIT.
        self._profiles: dict[tuple[int, int], Profile] = {}

    def count_user(self, step: int) -> None:
        """A version comes (1) or goes (-1): other weights share launches from here on."""
        self.users += step
        self._profiles.clear()

    def profile(
        self,
        rows: int,
        tokens: int,
        now_ns: int,
        cost: CostView,
        weights: dict[SignatureId, dict[int, int]],
    ) -> Profile:
        """Predictions for a request of this size; `weights`: those attached, by signature."""
        key = _round_up(rows), _round_up(tokens)
        found = self._profiles.get(key)
        if found is not None and now_ns - found.made_ns < PROFILE_AGE_NS:
            return found
        if found is None and len(self._profiles) >= PROFILES_LIMIT:
            del self._profiles[next(iter(self._profiles))]
        made = self._profiles[key] = self._predict(*key, now_ns, cost, weights)
        return made

    def _predict(
        self,
        rows: int,
        tokens: int,
        now_ns: int,
        cost: CostView,
        weights: dict[SignatureId, dict[int, int]],
    ) -> Profile:
        own, share, tail = [], [], [0] * len(self.successors)
        for signature, _, per_token, splittable in self.parts:
            units = tokens if per_token else rows
            sets = min(GROUP, max(1, len(weights.get(signature, ()))))
            own.append(cost.predict_ns(signature, units, 1, 1))
            if splittable and own[-1] > self._bound_ns and rows > 1:
                own[-1] = self._in_parts_ns(signature, units, rows, cost)
            grouped = cost.predict_ns(signature, units * GROUP, GROUP, sets)
            share.append(min(own[-1], grouped // GROUP))
        for index in reversed(range(len(tail))):
            after = max((tail[s] for s in self.successors[index]), default=0)
            tail[index] = own[index] + after
        return Profile(own, share, tail, now_ns)

    def _in_parts_ns(self, signature: SignatureId, units: int, rows: int, cost: CostView) -> int:
        """The time of all its parts: smaller launches do less per unit (see `Batch.split`)."""
        per_row = units // rows
        parts = count_parts(signature, rows, per_row, self._bound_ns, cost)
        return parts * cost.predict_ns(signature, -(-rows // parts) * per_row, 1, 1)


def count_parts(
    signature: SignatureId, rows: int, per_row: int, bound_ns: int, cost: CostView
) -> int:
    """In how many launches so many rows go, so that each is within the bound or a single row."""
    fits, too_many = 1, rows
    while fits + 1 < too_many:
        middle = (fits + too_many) // 2
        if cost.predict_ns(signature, middle * per_row, 1, 1) <= bound_ns:
            fits = middle
        else:
            too_many = middle
    return -(-rows // fits)


def _round_up(size: int) -> int:
    """To four significant bits, so that few sizes are predicted; never down."""
    shift = max(0, size.bit_length() - 4)
    return -(-size >> shift) << shift
