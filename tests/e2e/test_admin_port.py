"""The operator empties the caches of a whole server, and what was cached is computed again."""

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from chats import openai_messages, random_image
from server import Server, free_port, serving


def reset(port: int, what: str, key: str) -> int:
    """The status of POST /reset_... on the operator's port."""
    headers = {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/reset_{what}_cache", headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            assert response.read() == b""
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def ask(server: Server) -> int:
    """Ask about always the same image; return how many tokens of the prompt were cached."""
    with server.client() as client:
        answer = client.chat.completions.create(
            model=server.name, messages=openai_messages("What is it?", random_image(96, 96, 1)), max_tokens=1
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.conformance
def test_caches_are_emptied_and_filled_again(tiny_qwen3_vl: Path) -> None:
    port = free_port()
    flags = ("--max-model-len", "512", "--admin-port", str(port), "--admin-key", "operator")
    with serving(str(tiny_qwen3_vl), *flags) as server:
        ask(server)
        assert ask(server) > 0
        assert reset(port, "prefix", "wrong") == 401
        assert reset(server.port, "prefix", "operator") == 404
        assert ask(server) > 0

        assert reset(port, "prefix", "operator") == 200
        assert ask(server) == 0
        assert server.settled("saccade_encoded_items_total") == 1

        assert reset(port, "mm", "operator") == 200
        assert reset(port, "prefix", "operator") == 200
        decoded = server.metric("saccade_stage_seconds_count", stage="decode")
        assert ask(server) == 0
        assert server.settled("saccade_encoded_items_total") == 2
        assert server.metric("saccade_stage_seconds_count", stage="decode") == decoded + 1
        assert server.metric("saccade_image_cache_bytes") > 0
