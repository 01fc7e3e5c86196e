"""Tenant: who sends a request, and the salts that keep the caches of tenants apart."""

from dataclasses import dataclass

from blake3 import blake3

SALT_BYTES = 16
KEY_CONTEXT = "saccade 2026 cache salt of a tenant"
NAME_CONTEXT = "saccade 2026 key of the salts of named tenants"
REQUEST_CONTEXT = "saccade 2026 cache salt of a request"


@dataclass(frozen=True)
class Limits:
    """What a tenant may use in a minute; None is no limit. *tokens* are those of prompts and answers."""

    requests: int | None = None
    tokens: int | None = None
    picture_bytes: int | None = None

    def part(self, num_processes: int) -> "Limits":
        """Return the part of one of *num_processes* that serve the tenant, rounded up."""
        whole = (self.requests, self.tokens, self.picture_bytes)
        return Limits(*(None if limit is None else -(-limit // num_processes) for limit in whole))


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Tenant:
    """Who sends a request.

    *id* tells tenants apart, whatever key they use; *salt* keeps caches apart, and is the same for the tenants of one
    *group*. Of the requests that wait, a tenant of *priority* 2 has twice the part of one of priority 1. Only tenants
    of a keys file have a *name*.
    """

    id: bytes = b""
    salt: bytes = b""
    name: str = ""
    group: str = ""
    priority: int = 1
    limits: Limits = NO_LIMITS


EVERYBODY = Tenant()
"""The one tenant of a gateway without keys."""


def key_tenant(key: bytes) -> Tenant:
    """Return the tenant of a key that is a flag: its salt derives from the key, alike at every gateway of a fleet."""
    salt = blake3(key, derive_key_context=KEY_CONTEXT).digest(SALT_BYTES)
    return Tenant(salt, salt)


def named_tenant(name: str, group: str, priority: int, limits: Limits, salt_key: str) -> Tenant:
    """Return a tenant of a keys file.

    Its salt derives from *salt_key* and its group's name, or its own name where it has no group: keys may change, and
    caches stay. Every gateway with the same file finds the same salt.
    """
    secret = blake3(salt_key.encode(), derive_key_context=NAME_CONTEXT).digest()
    known_as = _named(secret, "tenant", name)
    salt = _named(secret, "group", group) if group else known_as
    return Tenant(known_as, salt, name, group, priority, limits)


def _named(secret: bytes, kind: str, name: str) -> bytes:
    return blake3(f"{kind}:{name}".encode(), key=secret).digest(SALT_BYTES)


def request_salt(salt: bytes, cache_salt: str | None) -> bytes:
    """Return the salt of a request: its tenant's, mixed with the request's *cache_salt* if it has one.

    The tenant's salt is the key of the mix, so that no request reaches the caches of another tenant.
    """
    if cache_salt is None:
        return salt
    key = blake3(salt, derive_key_context=REQUEST_CONTEXT).digest()
    return blake3(cache_salt.encode(), key=key).digest(SALT_BYTES)
