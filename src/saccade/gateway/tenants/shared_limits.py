"""Limits that several gateways share: each draws units of a tenant's limit from the database, and spends them."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.errors import StoreUnavailable
from saccade.gateway.tenants.bucket import REFILL_SECONDS, Bucket

DRAW_SECONDS: Final = 0.25
"""A request waits so long for the database; then the limit of the gateway alone holds."""

LOW_PART: Final = 4
"""Units are drawn when less than this fraction of a gateway's share is left."""

logger = logging.getLogger(__name__)


class LimitStore(Protocol):
    """Where the gateways' common buckets are."""

    @property
    def num_gateways(self) -> int:
        """How many gateways share the limits."""

    async def draw(
        self, tenant: bytes, draws: Sequence[tuple[int, float, float, float]]
    ) -> list[tuple[int, float, float]]:
        """Take units. A draw has the bucket's kind, its limit per minute, the units asked for, and those owed.

        Return kind, granted units and the level that is left, of each. Raises StoreUnavailable.
        """


class SharedLimits:
    """Says whether the *store* answers, and counts the requests that were decided without it."""

    def __init__(self, store: LimitStore) -> None:
        self.store = store
        self.is_local = False
        self.num_local = 0

    def note(self, is_local: bool) -> None:
        """Note whether the store has answered, and log a change."""
        if is_local and not self.is_local:
            logger.error("the state database does not answer: tenants have their limits at each gateway by itself")
        elif self.is_local and not is_local:
            logger.info("tenants have their limits over all gateways again")
        self.is_local = is_local


class SharedBucket(Bucket):
    """A gateway's part of a bucket that is in a database.

    *drawn* units may be spent without asking; they are negative after more was spent than was drawn. While the database
    is away, the gateway refills its own share of the limit.
    """

    def __init__(self, per_minute: int | None, limits: SharedLimits, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._limits = limits
        self._clock = clock
        self._drawn = 0.0
        self._spent = 0.0
        # What the database had left, and when that was.
        self._rest = math.inf if per_minute is None else float(per_minute)
        self._seen_at = clock()
        self._filled_at: float | None = None

    @property
    def share(self) -> float:
        """This gateway's part of the limit, if all gateways got the same."""
        return 0.0 if self.per_minute is None else max(1.0, self.per_minute / self._limits.store.num_gateways)

    @property
    def is_low(self) -> bool:
        """Whether units should be drawn: few are left, and the database may have some."""
        # The rest of a unit, or a whole one; a debt is settled as soon as there is one.
        needed = 1 - self._drawn if 0 <= self._drawn < 1 else 1.0
        few = max(1.0, self.share / LOW_PART)
        return self.per_minute is not None and self._drawn < few and self._others >= needed

    @property
    def is_empty(self) -> bool:
        """Whether no unit is left here."""
        return self.per_minute is not None and self._drawn < 1

    @property
    def level(self) -> float:
        return (
            math.inf if self.per_minute is None else min(float(self.per_minute), self._drawn + max(0.0, self._others))
        )

    @property
    def wait_seconds(self) -> float:
        if self.per_minute is None or self._drawn >= 1:
            return 0.0
        rate = self.share if self._filled_at is not None else self.per_minute
        return max(1e-3, 1 - self._drawn - self._others) * REFILL_SECONDS / rate

    @property
    def debt_seconds(self) -> float:
        return 0.0 if self.level >= 1 else self.wait_seconds

    def spend(self, num_units: int) -> None:
        if self.per_minute is not None:
            self._drawn -= num_units
            self._spent += num_units

    def resize(self, per_minute: int | None) -> None:
        if self.per_minute != per_minute:
            self.per_minute, self._drawn = per_minute, 0.0
            self._rest = math.inf if per_minute is None else float(per_minute)

    def asking(self, num_waiting: int) -> tuple[float, float]:
        """Return how many units to ask for, for *num_waiting* requests, and how many of them are owed."""
        return self.share - self._drawn + num_waiting, max(0.0, -self._drawn)

    def spare(self) -> float:
        """Return the units beyond what was spent since the last call, which others may need."""
        spent, self._spent = self._spent, 0.0
        spare = math.floor(self._drawn - max(0.0, spent))
        return 0.0 if self.per_minute is None or self._filled_at is not None else max(0.0, float(spare))

    def take(self, granted: float, level: float) -> None:
        """Add what the database has *granted*; it has *level* left."""
        self._drawn += granted
        self._rest, self._seen_at, self._filled_at = level, self._clock(), None

    def fill(self) -> None:
        """Refill this gateway's share, because the database does not answer."""
        if self.per_minute is None:
            return
        now = self._clock()
        if self._filled_at is not None:
            level = self._drawn + (now - self._filled_at) * self.share / REFILL_SECONDS
            self._drawn = max(self._drawn, min(self.share, level))
        self._filled_at, self._rest = now, 0.0

    @property
    def _others(self) -> float:
        """What the database has left, as far as this gateway knows."""
        if self.per_minute is None or self._filled_at is not None:
            return 0.0
        level = self._rest + (self._clock() - self._seen_at) * self.per_minute / REFILL_SECONDS
        return min(float(self.per_minute), level)


class SharedBuckets:
    """The *buckets* of the tenant with the id *tenant*; a bucket's kind is its place."""

    def __init__(self, tenant: bytes, buckets: Sequence[SharedBucket], limits: SharedLimits) -> None:
        self._tenant = tenant
        self._buckets = buckets
        self._limits = limits
        self._drawing: asyncio.Task[None] | None = None
        self._num_waiting = 0

    async def prepare(self) -> None:
        """Draw units for a request if few are left, and wait for them if none are.

        Once this returns, the caller must spend them before it waits for anything. At most one statement is executed
        for each call.
        """
        if self._limits.is_local:
            self._fill()
        while any(bucket.is_low for bucket in self._buckets) or self._limits.is_local:
            if self._drawing is None:
                self._drawing = asyncio.create_task(self._draw(), name="limits")
            if self._limits.is_local or not any(bucket.is_empty for bucket in self._buckets):
                return
            self._num_waiting += 1
            try:
                done, _ = await asyncio.wait({self._drawing}, timeout=DRAW_SECONDS)
                for task in done:
                    task.result()
            finally:
                self._num_waiting -= 1
            if not done:
                self._limits.note(is_local=True)
            if self._limits.is_local:
                self._fill()
                return

    async def give_back(self) -> None:
        """Return units that this gateway does not need to the database. Raises StoreUnavailable."""
        spares = [(kind, bucket, bucket.spare()) for kind, bucket in enumerate(self._buckets)]
        draws = [(kind, float(bucket.per_minute or 0), -spare, 0.0) for kind, bucket, spare in spares if spare]
        if draws:
            # They must not be spent while they are on their way.
            for kind, _, units, _ in draws:
                self._buckets[kind].take(units, 0.0)
            for kind, _, level in await self._limits.store.draw(self._tenant, draws):
                self._buckets[kind].take(0.0, level)

    def _fill(self) -> None:
        self._limits.num_local += 1
        for bucket in self._buckets:
            bucket.fill()

    async def _draw(self) -> None:
        try:
            draws = [
                (kind, float(bucket.per_minute), *bucket.asking(self._num_waiting if kind == 0 else 0))
                for kind, bucket in enumerate(self._buckets)
                if bucket.per_minute is not None
            ]
            for kind, granted, level in await self._limits.store.draw(self._tenant, draws):
                self._buckets[kind].take(granted, level)
            self._limits.note(is_local=False)
        except StoreUnavailable:
            self._limits.note(is_local=True)
        finally:
            self._drawing = None


class LimitMetrics(Collector):
    """Collects whether the gateways share the limits of tenants now, and how often they did not."""

    def __init__(self, limits: SharedLimits) -> None:
        self._limits = limits

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "saccade_state_local_limits",
            "Whether tenants have their limits at this gateway alone, because the database is away.",
            value=self._limits.is_local,
        )
        yield CounterMetricFamily(
            "saccade_state_locally_limited_requests",
            "Requests whose limits were checked without the database.",
            value=self._limits.num_local,
        )
