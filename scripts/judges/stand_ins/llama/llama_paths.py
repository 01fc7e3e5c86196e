"""A plugin of pytest: llama-server takes OpenAI's paths with and without /v1, and its tests leave it out."""

from typing import Any

import openai
import requests

PATHS = ("/chat/completions", "/responses", "/completions", "/models", "/messages")


def _with_version(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}/v1/{path}" if slash and f"/{path.split('?')[0]}" in PATHS else url


class Session(requests.Session):
    """Sends to OpenAI's own paths."""

    def request(self, method: Any, url: Any, *given: Any, **named: Any) -> requests.Response:
        """Send a request."""
        return super().request(method, _with_version(url), *given, **named)


def pytest_configure() -> None:
    """Replace what the tests send with."""
    requests.sessions.Session = Session  # type: ignore[misc]
    plain = openai.OpenAI.__init__

    def initialize(self: openai.OpenAI, *given: Any, base_url: str | None = None, **named: Any) -> None:
        if base_url is not None and "/v1" not in base_url:
            base_url = f"{base_url.rstrip('/')}/v1"
        plain(self, *given, base_url=base_url, **named)

    openai.OpenAI.__init__ = initialize  # type: ignore[method-assign]
