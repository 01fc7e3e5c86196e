"""Who may send requests: the key in a request's header, and the account that it opens."""

from collections.abc import Sequence

from saccade.errors import InvalidApiKey
from saccade.gateway.tenants.account import Account
from saccade.gateway.tenants.api_keys import ApiKeyStore

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Paths for orchestrators, which need no key; all others do."""

METRICS_PATH = "/metrics"

MESSAGES_PATH = "/v1/messages"
"""Begins the paths of Anthropic's API, whose clients send keys in a header of their own and read its errors."""


class Keys:
    """Checks the keys of requests. With *open_metrics*, /metrics needs no key either.

    Keys of the keys file do not open /metrics, which shows what every tenant uses.
    """

    def __init__(self, api_keys: ApiKeyStore, open_metrics: bool = False) -> None:
        self._api_keys = api_keys
        self._open_paths = OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS

    def account(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Account:
        """Return the account whose key *headers* carry; everybody's for paths without key. Raises InvalidApiKey."""
        if path in self._open_paths:
            return self._api_keys.everybody
        account = self._api_keys.account(_key(path, headers))
        if path == METRICS_PATH and account.tenant.name:
            raise InvalidApiKey(
                "This is the API key of a tenant, and /metrics shows what every tenant uses. Send a key of --api-key, "
                "or start the gateway with --metrics-without-key."
            )
        return account


def _key(path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    authorization = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return key
    if path.startswith(MESSAGES_PATH):
        return next((value for name, value in headers if name == b"x-api-key"), b"")
    return b""
