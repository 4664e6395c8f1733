"""The CPU device's weights: kept by content, shared by all tenants, counted to the byte.

Rules: a digest is held once, however many tenants loaded it; nothing is allocated before the limit
was checked; forms derived for speed (packed for a GEMM provider, stacked for a batched call) count
too and are the first to go when a tenant's own weights need the room. Called by `CpuDevice` on the
device thread only.

NOTE: a matrix used by `linear` is kept as (K, N) row-major *instead of* the (N, K) it came in, for
MKL reads that form up to 2.3 times faster at few rows; `plain` is made again when something else,
such as a tied embedding, asks for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch

#: Share of the memory limit that stacked copies of different tenants' weights may take.
STACK_SHARE = 0.05


class DeviceMemoryError(Exception):
    """The device's memory limit does not allow it; the message is a sentence for the tenant."""


class StoredWeight:
    """One weight and its forms. `shape` and `dtype` are those of the program."""

    __slots__ = ("__weakref__", "digest", "dtype", "forms", "parts", "plain_wanted", "refs",
                 "shape")  # fmt: skip

    def __init__(
        self, digest: str, tensor: torch.Tensor, parts: Sequence[StoredWeight] = ()
    ) -> None:
        self.digest = digest
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        #: How many loads hold it.
        self.refs = 0
        #: Form name -> tensor: "plain", "kn", and what plans derive; those names say all that the
        #: form depends on, for one weight may be read in several ways. Empty only if joined.
        self.forms: dict[str, torch.Tensor] = {"plain": tensor}
        self.plain_wanted = False
        #: Of a joined weight: see `WeightStore.join`.
        self.parts = parts

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def twin(self, digest: str) -> StoredWeight:
        """The same numbers as a weight of its own, outside any store; to measure with."""
        made = StoredWeight(digest, next(iter(self.forms.values())))
        made.shape, made.plain_wanted = self.shape, self.plain_wanted
        kept = {name: form for name, form in self.forms.items() if name in ("plain", "kn")}
        made.forms = {name: form.clone() for name, form in kept.items()}
        return made

    def convert(self, dtype: torch.dtype) -> None:
        """Keeps it as `dtype`, if it is not: bf16 weights may come in f32, which numpy has."""
        if dtype is not self.dtype:
            self.forms = {"plain": self.plain.to(dtype)}
            self.dtype = dtype

    @property
    def plain(self) -> torch.Tensor:
        """Row-major in the program's shape."""
        self.plain_wanted = True
        if "plain" not in self.forms:
            if self.parts:  # there was no room for it
                return torch.cat([part.plain for part in self.parts])
            self.forms["plain"] = self.forms["kn"].t().contiguous()
        return self.forms["plain"]

    def as_kn(self, layout: str) -> torch.Tensor:
        """The matrix as (K, N) row-major. `layout`: "nk" if its shape is (N, K), else "kn".

        From an (N, K) matrix that only GEMMs use, this form takes the place of `plain`.
        """
        if self.parts:
            return torch.cat([part.as_kn(layout) for part in self.parts], 1)
        if layout == "kn":
            return self.plain
        if "kn" not in self.forms:
            self.forms["kn"] = self.forms["plain"].t().contiguous()
            if not self.plain_wanted:
                del self.forms["plain"]
        return self.forms["kn"]


class WeightStore:
    """See the module. `bytes_held` counts every form of every weight and every stack."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._weights: dict[str, StoredWeight] = {}
        #: As long as weight sets hold them, which hold their parts too.
        self._joined: WeakValueDictionary[str, StoredWeight] = WeakValueDictionary()
        #: (layout, digests) -> copies of (K, N) forms as one (G, K, N) tensor; oldest use first.
        #: None: asked for once; a stack is made at the second asking.
        self._stacks: OrderedDict[tuple[str, ...], torch.Tensor | None] = OrderedDict()

    def __getitem__(self, digest: str) -> StoredWeight:
        return self._weights[digest]

    def __len__(self) -> int:
        return len(self._weights)

    def get(self, digest: str) -> StoredWeight | None:
        return self._weights.get(digest)

    @property
    def bytes_held(self) -> int:
        return sum(w.num_bytes * len(w.forms) for w in self._all()) + self._stack_bytes()

    @property
    def bytes_saved(self) -> int:
        """Bytes that would be held more if every load had a copy of its own."""
        return sum(w.num_bytes * (w.refs - 1) for w in self._weights.values())

    def load(
        self, items: Mapping[str, np.ndarray | torch.Tensor], held: Iterable[str] = ()
    ) -> None:
        """Holds each digest once more; `held` are there already (`KeyError` if not).

        Raises `DeviceMemoryError` before anything changed.
        """
        again = [self._weights[digest] for digest in held]
        fresh = {d: array for d, array in items.items() if d not in self._weights}
        self._make_room(sum(array.nbytes for array in fresh.values()))
        for digest, array in fresh.items():
            self._weights[digest] = StoredWeight(digest, _copy(array))
        for weight in (*again, *(self._weights[digest] for digest in items)):
            weight.refs += 1

    def drop(self, digests: Iterable[str]) -> None:
        """Gives each digest back once; the last one out frees it. `KeyError` if it is not held."""
        for digest in digests:
            weight = self._weights[digest]
            weight.refs -= 1
            if weight.refs == 0:
                del self._weights[digest]
                self.drop_stacks(digest)

    def drop_stacks(self, digest: str) -> None:
        for key in [k for k in self._stacks if any(digest in part for part in k[1:])]:
            del self._stacks[key]

    def join(self, parts: Sequence[StoredWeight]) -> StoredWeight:
        """Matrices side by side, or vectors one after the other, as one weight for all that ask.

        Nothing is held but what is derived from all of them.
        """
        digest = "+".join(part.digest for part in parts)
        if (found := self._joined.get(digest)) is None:
            nothing = torch.empty(0, dtype=parts[0].dtype)
            found = self._joined[digest] = StoredWeight(digest, nothing, parts)
            found.shape = (sum(math.prod(part.shape) for part in parts),)
            found.forms.clear()
        return found

    def derive(
        self, weight: StoredWeight, form: str, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """The weight's `form`, made by `make`; None when there is no room for it."""
        if self.bytes_held + weight.num_bytes > self.limit_bytes:
            return None
        weight.forms[form] = make()
        return weight.forms[form]

    def stack(self, weights: tuple[StoredWeight, ...], layout: str) -> torch.Tensor | None:
        """The (K, N) forms as one (G, K, N) tensor, from the second call with these weights on.

        With `layout` "bias", vectors as (G, 1, N).
        """
        key = (layout, *(weight.digest for weight in weights))
        if key not in self._stacks:
            self._stacks[key] = None
            while len(self._stacks) > 1024:
                self._stacks.popitem(last=False)
            return None
        self._stacks.move_to_end(key)
        made = self._stacks[key]
        size = sum(weight.num_bytes for weight in weights)
        if made is None and size <= self.limit_bytes * STACK_SHARE:
            while self._stack_bytes() + size > self.limit_bytes * STACK_SHARE:
                self._stacks.popitem(last=False)
            if self.bytes_held + size <= self.limit_bytes:
                forms = [w.plain[None] if layout == "bias" else w.as_kn(layout) for w in weights]
                made = self._stacks[key] = torch.stack(forms)
        return made

    def _stack_bytes(self) -> int:
        return sum(stack.nbytes for stack in self._stacks.values() if stack is not None)

    def _all(self) -> list[StoredWeight]:
        return [*self._weights.values(), *self._joined.values()]

    def _make_room(self, num_bytes: int) -> None:
        if self.bytes_held + num_bytes <= self.limit_bytes:
            return
        self._stacks.clear()
        for weight in self._all():
            kept = () if weight.parts else ("plain", "kn")
            weight.forms = {form: weight.forms[form] for form in weight.forms if form in kept}
        held = self.bytes_held
        if held + num_bytes > self.limit_bytes:
            raise DeviceMemoryError(
                f"The weights need {num_bytes:,} bytes, but the device has "
                f"{self.limit_bytes - held:,} left of its {self.limit_bytes:,}."
            )


def _copy(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach().clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(np.ascontiguousarray(array)).clone()  # torch aligns, numpy need not
