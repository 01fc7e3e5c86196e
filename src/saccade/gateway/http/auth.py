"""API keys, and the salt that separates the caches of tenants."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from blake3 import blake3

from saccade.errors import InvalidApiKey

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Paths for orchestrators, which need no key; all others do."""

METRICS_PATH = "/metrics"

SALT_BYTES = 16
SALT_CONTEXT = "saccade 2026 cache salt of a tenant"
REQUEST_SALT_CONTEXT = "saccade 2026 cache salt of a request"


class Keys:
    """The operator's API keys; only their hashes are kept. Without keys all clients are one tenant.

    With *open_metrics*, /metrics needs no key either.
    """

    def __init__(self, api_keys: Collection[str], open_metrics: bool = False) -> None:
        self._open_paths = OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS
        self._tenants = {_digest(key.encode()): _salt(key.encode()) for key in api_keys}

    def salt(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return the salt of the tenant whose key *headers* carry; b"" for paths without key. Raises InvalidApiKey."""
        if not self._tenants or path in self._open_paths:
            return b""
        authorization = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise InvalidApiKey("Send an API key in the header: Authorization: Bearer KEY.")
        return self.tenant(key)

    def tenant(self, key: bytes) -> bytes:
        """Return the salt of the tenant with *key*; b"" where there are no keys. Raises InvalidApiKey."""
        if not self._tenants:
            return b""
        given = _digest(key)
        # All keys are compared, so that the time taken does not depend on which one matches.
        matches = [salt for digest, salt in self._tenants.items() if hmac.compare_digest(digest, given)]
        if not matches:
            raise InvalidApiKey("This API key is not known here.")
        return matches[0]


def request_salt(tenant: bytes, cache_salt: str | None) -> bytes:
    """Return the salt of a request: its tenant's, mixed with the request's *cache_salt* if it has one.

    The tenant's salt is the key of the mix, so that no request reaches the caches of another tenant.
    """
    if cache_salt is None:
        return tenant
    key = blake3(tenant, derive_key_context=REQUEST_SALT_CONTEXT).digest()
    return blake3(cache_salt.encode(), key=key).digest(SALT_BYTES)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _salt(key: bytes) -> bytes:
    """Derive the tenant's salt from the key, so that every gateway of a fleet finds the same."""
    return blake3(key, derive_key_context=SALT_CONTEXT).digest(SALT_BYTES)
