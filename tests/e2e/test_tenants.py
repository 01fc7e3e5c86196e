"""Tenants of a keys file at one server: caches by group, limits a minute, usage, and a file that changes."""

import hashlib
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from chats import openai_messages, random_image
from openai.types.chat import ChatCompletion
from server import Server
from waiting import wait_until

TENANTS = """
[tenants.acme]
group = "research"
tokens_per_minute = 1_000_000
requests_per_minute = 10

[tenants.lab]
group = "research"

[tenants.outside]

[tenants.small]
tokens_per_minute = 20

[tenants.busy]
requests_per_minute = 2

[tenants.blind]
image_bytes_per_minute = 100
"""
NAMES = ("acme", "lab", "outside", "small", "busy", "blind")


@dataclass(frozen=True)
class Served:
    """A server with a keys file, which has keys of all NAMES."""

    server: Server
    file: Path
    admin_port: int

    def ask(self, tenant: str, *parts: Any, **options: Any) -> ChatCompletion:
        with self.server.client(api_key=key_of(tenant)) as client:
            options = {"max_tokens": 1, **options}
            return client.chat.completions.create(
                model=self.server.name, messages=openai_messages(*parts), stream=False, **options
            )

    def num_cached(self, tenant: str, *parts: Any) -> int:
        usage = self.ask(tenant, *parts).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    def status(self, tenant: str) -> int:
        """What a request of the tenant is answered with."""
        try:
            self.ask(tenant, "Hello")
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    def write(self, content: str) -> None:
        """Replace the keys file in one step."""
        other = self.file.with_suffix(".new")
        other.write_text(content)
        os.replace(other, self.file)

    def usage(self) -> dict[str, Any]:
        """What the admin port says of each tenant."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin_port}/usage")
        request.add_header("authorization", "Bearer operator")
        with urllib.request.urlopen(request, timeout=10) as response:
            return {report["tenant"]: report for report in json.load(response)["tenants"]}


def key_of(tenant: str) -> str:
    return f"sk-{tenant}-{'k' * 32}"


def entry(tenant: str) -> str:
    """The entry of a tenant's key."""
    return f'\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{hashlib.sha256(key_of(tenant).encode()).hexdigest()}"\n'


@pytest.fixture(scope="module")
def served(tiny_server: Server, keys_file: Path, admin_port: int) -> Served:
    served = Served(tiny_server, keys_file, admin_port)
    served.write(TENANTS + "".join(map(entry, NAMES)))
    wait_until(lambda: served.status("lab") == 200)
    return served


def refused(served: Served, tenant: str, *parts: Any) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as error:
        served.ask(tenant, *parts)
    assert error.value.code == "rate_limit_exceeded"
    return error.value


def test_caches_are_shared_within_a_group_alone(served: Served) -> None:  # F3
    parts = ("What is it?", random_image(96, 96, 1))
    assert served.num_cached("acme", *parts) == 0
    assert served.num_cached("acme", *parts) > 0
    assert served.num_cached("lab", *parts) > 0
    assert served.num_cached("outside", *parts) == 0
    assert served.num_cached("outside", *parts) > 0


def test_tenant_over_its_request_limit_gets_retry_after(served: Served) -> None:
    for _ in range(2):
        served.ask("busy", "Hello")
    error = refused(served, "busy", "Hello")
    assert "2 requests a minute" in error.message
    headers = error.response.headers
    assert 0 < int(headers["retry-after"]) <= 30
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("2", "0")
    assert "x-ratelimit-limit-tokens" not in headers
    wait_until(lambda: served.usage()["busy"]["usage"]["requests"] == 2)  # counted when they have ended
    usage = served.usage()["busy"]
    assert (usage["requests_per_minute"], usage["tokens_per_minute"], usage["priority"]) == (2, None, 1)
    assert (usage["usage"]["requests"], usage["usage"]["refused"]) == (2, 1)


def test_tokens_and_image_bytes_have_limits(served: Served) -> None:
    usage = served.ask("small", "Hello", max_tokens=30, extra_body={"min_tokens": 30}).usage
    assert usage is not None
    assert "20 tokens a minute" in refused(served, "small", "Hello").message
    wait_until(lambda: served.usage()["small"]["usage"]["requests"])
    assert served.usage()["small"]["usage"] == {
        "requests": 1,
        "refused": 1,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": 0,
        "completion_tokens": 30,
        "image_bytes": 0,
    }
    served.ask("blind", "What is it?", random_image(96, 96, 2))
    assert "100 bytes of images a minute" in refused(served, "blind", "And this?", random_image(96, 96, 3)).message
    served.ask("blind", "And without one?")
    assert served.usage()["blind"]["usage"]["image_bytes"] > 100


def test_several_prompts_of_one_request_count_once(served: Served) -> None:
    before = served.usage()["outside"]["usage"]

    def used() -> dict[str, int]:
        return {name: number - before[name] for name, number in served.usage()["outside"]["usage"].items()}

    with served.server.client(api_key=key_of("outside")) as client:
        answer = client.completions.create(
            model=served.server.name, prompt=["Once", "upon a time"], n=2, max_tokens=3, extra_body={"min_tokens": 3}
        )
    wait_until(lambda: used()["requests"] == 1)
    assert answer.usage is not None
    assert used()["prompt_tokens"] == answer.usage.prompt_tokens
    assert used()["completion_tokens"] == answer.usage.completion_tokens == 12


def test_streams_have_the_headers_too(served: Served) -> None:
    with served.server.client(api_key=key_of("acme")) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=served.server.name, messages=openai_messages("Hello"), stream=True, max_tokens=1
        )
        assert raw.headers["x-ratelimit-limit-tokens"] == "1000000"
        assert int(raw.headers["x-ratelimit-remaining-requests"]) < 10
        assert raw.headers["x-ratelimit-reset-requests"] != "0s"
        assert list(raw.parse())


def test_tenants_cannot_read_the_metrics_of_all(served: Served) -> None:
    before = served.usage()["outside"]["usage"]["requests"]
    served.ask("outside", "Hello")
    wait_until(lambda: served.usage()["outside"]["usage"]["requests"] > before)
    metric = served.server.metric("saccade_tenant_requests_total", tenant="outside")
    assert metric == served.usage()["outside"]["usage"]["requests"]
    request = urllib.request.Request(f"{served.server.url}/metrics")
    request.add_header("authorization", f"Bearer {key_of('acme')}")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=10)


def test_changed_keys_file_is_read_and_a_broken_one_ignored(served: Served) -> None:
    def is_current() -> float:
        return served.server.metric("saccade_api_keys_file_current")

    assert (served.status("lab"), served.status("late"), is_current()) == (200, 401, 1)
    whole = f"{TENANTS}[tenants.late]\n{entry('acme')}{entry('late')}"
    served.write(whole)
    wait_until(lambda: served.status("late") == 200)
    assert (served.status("lab"), served.status("acme")) == (401, 200)
    served.write(f"{whole}[[keys]]\ntenant = 'nobody'")
    wait_until(lambda: is_current() == 0)
    assert served.status("late") == 200
    log = served.server.log
    assert log is not None
    wait_until(lambda: "[[keys]] number 3" in log.read_text())  # a thread of its own writes it
    served.write(whole)
    wait_until(lambda: is_current() == 1)
