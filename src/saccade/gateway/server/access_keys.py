"""The keys that a server accepts, and the headers in which requests send them."""

from collections.abc import Collection, Sequence

from saccade.errors import (
    InvalidApiKey,
)
from saccade.gateway.server.access_log import PROBES
from saccade.gateway.tenants.account import Account
from saccade.gateway.tenants.api_keys import ApiKeyStore

MESSAGES_PATH = "/v1/messages"
"""Prefix of Anthropic's API, whose clients send keys in another header and read Anthropic's errors."""


METRICS_PATH = "/metrics"


class Keys:
    """Checks requests' keys. PROBES and *more_open_paths* need no key.

    Keys from the keys file do not open /metrics, which shows every tenant's usage. If /metrics is an open path, a
    request without an operator's key gets everybody's account, and sees no tenant's metrics.
    """

    def __init__(self, api_keys: ApiKeyStore, more_open_paths: Collection[str] = ()) -> None:
        self._api_keys = api_keys
        self._open_paths = PROBES.union(more_open_paths)

    def account(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Account:
        """Return the account for the key in *headers*, or everybody's account on open paths. Raises InvalidApiKey."""
        if path in self._open_paths:
            return self._operator(path, headers) if path == METRICS_PATH else self._api_keys.everybody
        account = self._api_keys.account(_key(path, headers))
        if path == METRICS_PATH and account.tenant.name:
            raise InvalidApiKey(
                "This is the API key of a tenant, and /metrics shows what every tenant uses. Send a key of --api-key, "
                "or start the gateway with --metrics-without-key."
            )
        return account

    def _operator(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Account:
        """Return the account for a key from --api-key, else everybody's account."""
        try:
            account = self._api_keys.account(_key(path, headers))
        except InvalidApiKey:
            return self._api_keys.everybody
        return self._api_keys.everybody if account.tenant.name else account


def _key(path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    authorization = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return key
    if path.startswith(MESSAGES_PATH):
        return next((value for name, value in headers if name == b"x-api-key"), b"")
    return b""
