"""Caches with a byte limit, which drop the least recently used values first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """Keeps values by key, up to a total of *budget_bytes*.

    A put that exceeds the budget drops the least recently used values. Keys for which *is_pinned* is true stay, even if
    they alone exceed the budget; call trim() after a key is unpinned. *on_drop* is called with each dropped key and
    value, but not when a value is popped or replaced. Iteration yields keys, the least recently used first.
    """

    def __init__(
        self,
        budget_bytes: int,
        is_pinned: Callable[[K], bool] = lambda _: False,
        on_drop: Callable[[K, V], None] = lambda *_: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self._is_pinned = is_pinned
        self._on_drop = on_drop
        # By key, a value and its size in bytes.
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield keys and values, the least recently used first."""
        return ((key, value) for key, (value, _) in self._entries.items())

    def peek(self, key: K) -> V | None:
        """Return the value of *key* without marking it as used, or None if there is none."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: K) -> V | None:
        """Return the value of *key* and mark it as used, or return None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Add or replace a value, and mark it as the most recently used."""
        self.pop(key)
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        self.trim()

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        value, num_bytes = entry
        self.num_bytes -= num_bytes
        return value

    def drop(self, key: K) -> None:
        if key in self._entries:
            value, _ = self._entries[key]
            self.pop(key)
            self._on_drop(key, value)

    def trim(self) -> None:
        """Drop unpinned values, the least recently used first, until the rest fits the budget or is pinned."""
        while self.num_bytes > self.budget_bytes:
            unpinned = next((key for key in self._entries if not self._is_pinned(key)), None)
            if unpinned is None:
                return
            self.drop(unpinned)

    def clear(self) -> None:
        """Drop everything that is not pinned."""
        for key in [key for key in self._entries if not self._is_pinned(key)]:
            self.drop(key)


class TenantLru(Generic[K, V]):
    """Keeps each tenant's values by key, up to *budget_bytes* for all tenants together.

    While the total exceeds the budget, the tenant with the most bytes loses its least recently used value.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._tenants: dict[bytes, ByteLru[K, V]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(values.num_bytes for values in self._tenants.values())

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def of_tenant(self, tenant: bytes) -> ByteLru[K, V]:
        """Return *tenant*'s values, for reading only, or an empty cache if there are none."""
        return self._tenants.get(tenant) or ByteLru(0)

    def items(self) -> Iterator[tuple[bytes, K, V]]:
        """Yield the tenant, key and value of every entry."""
        return ((tenant, key, value) for tenant, values in self._tenants.items() for key, value in values.items())

    def put(self, tenant: bytes, key: K, value: V, num_bytes: int) -> None:
        """Add or replace *tenant*'s value, as its most recently used. A value that exceeds the budget is not kept."""
        values = self._tenants.setdefault(tenant, ByteLru(self.budget_bytes))
        values.put(key, value, num_bytes)
        if not len(values):
            del self._tenants[tenant]
        while self.num_bytes > self.budget_bytes:
            largest = max(self._tenants, key=lambda one: self._tenants[one].num_bytes)
            self.pop(largest, next(iter(self._tenants[largest])))

    def pop(self, tenant: bytes, key: K) -> V | None:
        """Remove a value and return it, or return None if there is none."""
        values = self.of_tenant(tenant)
        value = values.pop(key)
        if not len(values):
            self._tenants.pop(tenant, None)
        return value
