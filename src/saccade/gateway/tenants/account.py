"""Tenants, who send requests, and their accounts, which hold their usage and what is left of their limits."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blake3 import blake3

from saccade.errors import Draining, RateLimitExceeded, WorkerUnavailable
from saccade.gateway.tenants.bucket import Bucket, TokenBucket
from saccade.gateway.tenants.shared_limits import SharedBucket, SharedBuckets, SharedLimits
from saccade.gateway.usage_log import UsageLog
from saccade.protocol.gateway_calls import TenantUsage

SALT_BYTES = 16
KEY_CONTEXT = "saccade 2026 cache salt of a tenant"
NAME_CONTEXT = "saccade 2026 key of the salts of named tenants"
REQUEST_CONTEXT = "saccade 2026 cache salt of a request"


ACCOUNT = "saccade.account"
"""Key of the ASGI scope for the account of a request's tenant."""


@dataclass(frozen=True)
class Limits:
    """A tenant's limits per minute; None means no limit. *tokens* counts prompts and answers."""

    requests: int | None = None
    tokens: int | None = None
    image_bytes: int | None = None

    def part(self, num_processes: int) -> "Limits":
        """Return each process's share among *num_processes*, rounded up."""
        whole = (self.requests, self.tokens, self.image_bytes)
        return Limits(*(None if limit is None else -(-limit // num_processes) for limit in whole))


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Tenant:
    """Who sends a request."""

    id: bytes = b""
    """The same for all keys of the tenant."""
    salt: bytes = b""
    """Separates caches."""
    name: str = ""
    """Only tenants of a keys file have one."""
    group: str = ""
    """Tenants of one group share a salt."""
    priority: int = 1
    """A tenant of priority 2 gets twice the share of the queue of one with priority 1."""
    limits: Limits = NO_LIMITS


EVERYBODY = Tenant()
"""The only tenant of a gateway without keys."""


def key_tenant(key: bytes) -> Tenant:
    """Return the tenant of a key from a flag. Its salt derives from the key, so all gateways in a fleet agree on it."""
    salt = blake3(key, derive_key_context=KEY_CONTEXT).digest(SALT_BYTES)
    return Tenant(salt, salt)


def named_tenant(name: str, group: str, priority: int, limits: Limits, salt_key: str) -> Tenant:
    """Return a tenant from a keys file.

    Its salt derives from *salt_key* and its group's name or, without a group, its own name. So caches outlive a change
    of keys, and every gateway with the same file derives the same salt.
    """
    secret = blake3(salt_key.encode(), derive_key_context=NAME_CONTEXT).digest()
    known_as = _named(secret, "tenant", name)
    salt = _named(secret, "group", group) if group else known_as
    return Tenant(known_as, salt, name, group, priority, limits)


def _named(secret: bytes, kind: str, name: str) -> bytes:
    return blake3(f"{kind}:{name}".encode(), key=secret).digest(SALT_BYTES)


def request_salt(salt: bytes, cache_salt: str | None) -> bytes:
    """Return the salt of a request: its tenant's, hashed with the request's *cache_salt* if it has one.

    The tenant's salt is the key of the hash, so that no request reaches another tenant's caches.
    """
    if cache_salt is None:
        return salt
    key = blake3(salt, derive_key_context=REQUEST_CONTEXT).digest()
    return blake3(cache_salt.encode(), key=key).digest(SALT_BYTES)


@dataclass(frozen=True)
class Ledger:
    """What the gateways of a database keep together: the usage of tenants, and their limits."""

    usage_log: UsageLog
    limits: SharedLimits


@dataclass
class Charge:
    """What a request in progress is counted as: its *model* is known once its body has been read."""

    model: str = ""


class Account:
    """A tenant's account at one gateway process. Each of *num_processes* has its share of the limits.

    A request is refused if a limit has nothing left; otherwise it is charged in full. A prompt may be longer than what
    is left, and an answer's tokens are known only as they are generated. The excess is deducted from the next minute.
    With *ledger*, a database keeps the usage by model, and all of its gateways share the limits.
    """

    def __init__(
        self,
        tenant: Tenant,
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        self.tenant = tenant
        self.usage = TenantUsage()
        self._log = None if ledger is None else ledger.usage_log
        self._num_processes = 1 if ledger is not None else num_processes
        self._shared: SharedBuckets | None = None
        limits = tenant.limits.part(self._num_processes)
        whole = (limits.requests, limits.tokens, limits.image_bytes)
        self._requests: Bucket
        self._tokens: Bucket
        self._image_bytes: Bucket
        if ledger is None:
            self._requests, self._tokens, self._image_bytes = (TokenBucket(limit, clock) for limit in whole)
        else:
            shared = [SharedBucket(limit, ledger.limits, clock) for limit in whole]
            self._requests, self._tokens, self._image_bytes = shared
            self._shared = SharedBuckets(tenant.id, shared, ledger.limits)

    async def prepare(self) -> None:
        """Draw units of limits that several gateways share, if few are left here.

        Call this before request(), and wait for nothing in between.
        """
        if self._shared is not None and self.tenant.limits != NO_LIMITS:
            await self._shared.prepare()

    async def give_back(self) -> None:
        """Return units that are not used here, so that other gateways have them. Raises StoreUnavailable."""
        if self._shared is not None and self.tenant.limits != NO_LIMITS:
            await self._shared.give_back()

    def change(self, tenant: Tenant) -> None:
        """Apply the tenant's changed limits, priority or group."""
        self.tenant = tenant
        limits = tenant.limits.part(self._num_processes)
        self._requests.resize(limits.requests)
        self._tokens.resize(limits.tokens)
        self._image_bytes.resize(limits.image_bytes)

    @contextmanager
    def request(self) -> Iterator[Charge]:
        """Count the request in the block, towards the limit at once and as usage when the block ends.

        A request that no worker could serve is not charged. Raises RateLimitExceeded, before the block, if no request
        or token is left.
        """
        self._check(self._requests, "requests", self._requests.wait_seconds)
        self._check(self._tokens, "tokens", self._tokens.wait_seconds)
        self._requests.spend(1)
        charge = Charge()
        is_charged = True
        try:
            yield charge
        except (Draining, WorkerUnavailable):
            is_charged = False
            raise
        finally:
            if is_charged:
                for usage in self._usages(charge.model):
                    usage.requests += 1
            else:
                self._requests.spend(-1)

    def begin_images(self, num_images: int) -> None:
        """Raise RateLimitExceeded if a request has images and no bytes are left, before any image is fetched."""
        if num_images:
            self._check(self._image_bytes, "bytes of images", self._image_bytes.debt_seconds)

    def use_images(self, num_bytes: int, model: str = "") -> None:
        """Count the encoded bytes of a request's images. Raises RateLimitExceeded if nothing is left."""
        if num_bytes:
            self._check(self._image_bytes, "bytes of images", self._image_bytes.debt_seconds)
            self._image_bytes.spend(num_bytes)
            for usage in self._usages(model):
                usage.image_bytes += num_bytes

    def use_prompt(self, num_tokens: int, model: str = "") -> None:
        """Count a prompt. Raises RateLimitExceeded if nothing is left."""
        self._check(self._tokens, "tokens", self._tokens.debt_seconds)
        self._tokens.spend(num_tokens)
        for usage in self._usages(model):
            usage.prompt_tokens += num_tokens

    def use_answer(self, num_tokens: int, model: str = "") -> None:
        """Count generated tokens; no limit stops them."""
        self._tokens.spend(num_tokens)
        for usage in self._usages(model):
            usage.completion_tokens += num_tokens

    def use_cached(self, num_tokens: int, model: str = "") -> None:
        """Count prompt tokens that a worker had in its cache."""
        for usage in self._usages(model):
            usage.cached_tokens += num_tokens

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield OpenAI's rate limit headers for requests and tokens, if there are such limits."""
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.per_minute is not None:
                remaining = max(0, math.floor(bucket.level))
                yield f"x-ratelimit-limit-{name}".encode(), str(bucket.per_minute).encode()
                yield f"x-ratelimit-remaining-{name}".encode(), str(remaining).encode()
                yield f"x-ratelimit-reset-{name}".encode(), duration(bucket.reset_seconds).encode()

    def _usages(self, model: str) -> tuple[TenantUsage, ...]:
        """Return the counts of a request for *model*: those of this process, and with a ledger those of today."""
        if self._log is None:
            return (self.usage,)
        return self.usage, self._log.row(self.tenant.id, model)

    def _check(self, bucket: Bucket, what: str, seconds: float) -> None:
        wait_seconds = math.ceil(seconds)
        if wait_seconds:
            for usage in self._usages(""):
                usage.refused += 1
            raise RateLimitExceeded(
                f"The limit of {bucket.per_minute} {what} a minute of the tenant {self.tenant.name!r} is used up; try "
                f"again in {wait_seconds} s.",
                retry_after_seconds=wait_seconds,
            )


def duration(seconds: float) -> str:
    """Format *seconds*, rounded up to milliseconds, as OpenAI does: 0s, 250ms, 8.5s, 1m12.5s."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
