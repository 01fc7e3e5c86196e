"""`saccade inspect --gateway`: ask a running gateway which worker a chat would go to, and why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from saccade.cli.admin_port import call, require_key
from saccade.errors import StartupError


def show_route(gateway: str, admin_key: str | None, api_key: str | None, chat: Path, *, as_json: bool) -> None:
    """Print where *chat*, the body of a chat completion request as a JSON file, would go. Raises StartupError.

    *gateway* is the URL of the admin port; *api_key* names the tenant whose caches count.
    """
    key = require_key(admin_key)
    try:
        body = chat.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {chat}: {error.strerror}.") from error
    answer = call(gateway, "/route", key, body, api_key)
    if as_json:
        print(msgspec.json.format(answer).decode())
    else:
        print(*_lines(msgspec.json.decode(answer)), sep="\n")


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
