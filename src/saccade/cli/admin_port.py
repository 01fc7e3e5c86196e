"""Calls a running gateway's admin port."""

import os
import ssl
from typing import TypeVar

import httpx2
import msgspec

from saccade.errors import InvalidApiKey, StartupError
from saccade.gateway.admin import TENANT_HEADER
from saccade.transport.framing import UNREADABLE
from saccade.transport.unreachable import why_unreachable

TIMEOUT_SECONDS = 60.0

T = TypeVar("T")


def require_key(admin_key: str | None, user: str = "--gateway") -> str:
    """Return *admin_key*. If there is none, raises a StartupError that says what *user* needs."""
    if admin_key is None:
        raise StartupError(f"{user} needs an --admin-key of that gateway: pass one, or set SACCADE_ADMIN_KEY.")
    return admin_key


def read_answer(gateway: str, path: str, admin_key: str, kind: type[T], command: str) -> T:
    """Return *gateway*'s answer to a GET as a value of *kind*. Raises StartupError.

    *command* is what the error for a gateway of another version tells the user to run.
    """
    try:
        return msgspec.json.decode(call(gateway, path, admin_key), type=kind)
    except UNREADABLE as error:
        raise StartupError(f"The gateway has another version: run the `{command}` of that version.") from error


def call(gateway: str, path: str, admin_key: str, body: bytes | None = None, api_key: str | None = None) -> bytes:
    """Return the answer from *gateway*, the URL of an admin port, to a GET or to a POST of the JSON *body*.

    *api_key* names the tenant whose caches count. Raises StartupError.
    """
    headers = {"authorization": f"Bearer {admin_key}", "content-type": "application/json"}
    headers |= {} if api_key is None else {TENANT_HEADER: api_key}
    method = "GET" if body is None else "POST"
    try:
        # Else httpx2 takes an authority from the environment only together with proxies.
        verify = ssl.create_default_context() if "SSL_CERT_FILE" in os.environ else True
        with httpx2.Client(trust_env=False, timeout=TIMEOUT_SECONDS, verify=verify) as client:
            response = client.request(method, f"{gateway.rstrip('/')}{path}", content=body, headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        remedy = "Pass the address of a gateway's --admin-port, as http://127.0.0.1:PORT."
        raise StartupError(why_unreachable(gateway, error, remedy)) from error
    if response.status_code != httpx2.codes.OK:
        raise StartupError(f"The gateway refused with {response.status_code}: {_fault(response.content)}")
    return response.content


def _fault(body: bytes) -> str:
    """Return the cause of a refusal; for a missing key, name the flag instead of the header."""
    try:
        error = msgspec.json.decode(body)["error"]
        if error.get("code") == InvalidApiKey.code:
            return "it has no such --admin-key."
        if error.get("param") == TENANT_HEADER:
            return "the caches of tenants are apart. Pass one of its API keys as --api-key, or set SACCADE_API_KEY."
        return str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return "the body is not an answer of Saccade's admin port."
