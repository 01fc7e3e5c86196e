"""`saccade inspect --gateway`: ask a running gateway which worker a chat would go to, and why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from saccade.errors import InvalidApiKey, StartupError
from saccade.gateway.apis.admin import TENANT_HEADER

TIMEOUT_SECONDS = 60.0


def show_route(gateway: str, admin_key: str | None, api_key: str | None, chat: Path, *, as_json: bool) -> None:
    """Print where *chat*, the body of a chat completion request as a JSON file, would go. Raises StartupError.

    *gateway* is the URL of the admin port; *api_key* names the tenant whose caches count.
    """
    if admin_key is None:
        raise StartupError("--gateway needs an --admin-key of that gateway: pass one, or set SACCADE_ADMIN_KEY.")
    try:
        body = chat.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {chat}: {error.strerror}.") from error
    answer = _ask(gateway, admin_key, api_key, body)
    if as_json:
        print(msgspec.json.format(answer).decode())
    else:
        print(*_lines(msgspec.json.decode(answer)), sep="\n")


def _ask(gateway: str, admin_key: str, api_key: str | None, body: bytes) -> bytes:
    headers = {"authorization": f"Bearer {admin_key}", "content-type": "application/json"}
    headers |= {} if api_key is None else {TENANT_HEADER: api_key}
    try:
        with httpx2.Client(trust_env=False, timeout=TIMEOUT_SECONDS) as client:
            response = client.post(f"{gateway.rstrip('/')}/route", content=body, headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise StartupError(
            f"No gateway answers at {gateway}. Pass the address of its --admin-port, as http://127.0.0.1:PORT."
        ) from error
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


def _lines(route: dict[str, Any]) -> Iterator[str]:
    """Yield *route* for people: the choice first, then every worker with the sum of its cost."""
    yield f"worker    {route['worker']}: {route['reason']}"
    yield f"model     {route['model']}"
    yield f"prompt    {route['prompt_tokens']} tokens"
    for image in route["pictures"]:
        yield f"image   {image['tokens']} tokens from {image['start']} on"
    yield f"policy    {route['policy']}"
    for one in route["candidates"]:
        why = f" ({one['exactness_reason']})" if one["exactness_reason"] else ""
        total = one["cost"].pop("total")
        terms = " + ".join(f"{value:g} {name.replace('_', ' ')}" for name, value in one["cost"].items())
        yield ""
        yield f"{one['worker']}{', chosen' if one['chosen'] else ''}"
        yield f"  {one['exactness']}{why}: holds {one['overlap_blocks']} of {one['num_blocks']} blocks"
        yield f"  cost {total:g} = {terms}"
    for one in route["excluded"]:
        yield ""
        yield f"{one['worker']}, not a candidate: {one['reason']}"
