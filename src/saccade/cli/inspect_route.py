"""`saccade inspect --gateway`: ask a running gateway which worker a chat would go to, and why."""

from pathlib import Path
from typing import Any

import httpx2
import msgspec
from rich.console import Console
from rich.table import Table

from saccade.errors import StartupError

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
        _show(Console(), msgspec.json.decode(answer))


def _ask(gateway: str, admin_key: str, api_key: str | None, body: bytes) -> bytes:
    headers = {"authorization": f"Bearer {admin_key}", "content-type": "application/json"}
    headers |= {} if api_key is None else {"x-api-key": api_key}
    try:
        with httpx2.Client(trust_env=False, timeout=TIMEOUT_SECONDS) as client:
            response = client.post(f"{gateway.rstrip('/')}/route", content=body, headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise StartupError(
            f"No gateway answers at {gateway}. Pass the address of its --admin-port, as http://127.0.0.1:PORT."
        ) from error
    if response.status_code != httpx2.codes.OK:
        raise StartupError(f"The gateway refused with {response.status_code}: {_message(response.content)}")
    return response.content


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "what it says is not an answer of Saccade's admin port."


def _show(console: Console, route: dict[str, Any]) -> None:
    pictures = ", ".join(f"{one['tokens']} tokens from {one['start']}" for one in route["pictures"]) or "none"
    facts = Table.grid(padding=(0, 2))
    facts.add_row("model", route["model"])
    facts.add_row("prompt", f"{route['prompt_tokens']} tokens")
    facts.add_row("pictures", pictures)
    facts.add_row("policy", route["policy"])
    facts.add_row("worker", f"{route['worker']}, {route['reason']}")
    console.print(facts, markup=False, highlight=False, soft_wrap=True)
    console.print()
    candidates = route["candidates"]
    terms = list(candidates[0]["cost"])
    table = Table("worker", "exactness", "overlap", *(term.replace("_", " ") for term in terms), box=None)
    for one in candidates:
        overlap = f"{one['overlap_blocks']} of {one['num_blocks']}"
        costs = (f"{value:g}" for value in one["cost"].values())
        exactness = (
            one["exactness"] if one["exactness"] == "EXACT" else f"{one['exactness']}: {one['exactness_reason']}"
        )
        table.add_row(one["worker"], exactness, overlap, *costs)
    console.print(table, markup=False, highlight=False)
    for one in route["excluded"]:
        console.print(
            f"not considered: {one['worker']}: {one['reason']}", markup=False, highlight=False, soft_wrap=True
        )
