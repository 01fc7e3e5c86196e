"""One gateway over workers of three kinds under one name: Saccade's wire, TokenSpeed's and vLLM's."""

import asyncio
import contextlib
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from chats import Part, openai_messages, random_image
from prometheus_client.parser import text_string_to_metric_families
from server import Server, free_port, program
from vllm_worker import VllmServer, event, kwargs_data, listening, rendered, usage
from waiting import wait_until

pytestmark = pytest.mark.conformance

NAME = "mixed"
NUM_TOKENS = 4
PATCH_WIDTH = 2 * 3 * 16 * 16
MAX_TRIES = 60
"""So many random choices in a row pass over one worker of three once in 10^10 runs."""


@dataclass(frozen=True)
class Fleet:
    """A gateway over three workers, and their URLs; *vllm* answers by a script."""

    gateway: Server
    vllm: VllmServer
    urls: tuple[str, str, str]

    def placed(self, counted: str = "saccade_router_requests_total") -> dict[str, float]:
        """What is *counted* so far, where it is not 0, by the worker's URL: by default requests."""
        families = text_string_to_metric_families(self._metrics())
        return {
            sample.labels["worker"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == counted and sample.value
        }

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.gateway.url}/metrics") as response:
            return str(response.read(), "utf-8")

    async def ask(self, *parts: Part, **options: Any) -> tuple[str, Any]:
        """Ask; return the URL of the worker that answered, and the answer."""
        before = await asyncio.to_thread(self.placed)
        answer = await asyncio.to_thread(self.send, parts, options)
        after = await asyncio.to_thread(self.placed)
        (worker,) = (url for url in after if after[url] > before.get(url, 0))
        return worker, answer

    def send(self, parts: tuple[Part, ...], options: dict[str, Any]) -> Any:
        given: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
        with self.gateway.client() as client:
            return client.chat.completions.create(
                model=NAME,
                messages=openai_messages(*parts),
                extra_body={"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})},
                **(given | options),
            )


@pytest.fixture(scope="module")
def workers(network_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A worker on Saccade's wire, and one on TokenSpeed's that reports what it holds."""
    folder, scratch, port = str(network_folder("qwen3_vl")), tmp_path_factory.mktemp("mixed"), free_port()
    flags = ("--served-model-name", NAME, "--max-model-len", "1024", "--dtype", "float32")
    foreign = ("--serve-tokenspeed", f"127.0.0.1:{port}", "--kv-events-token-ids")
    with (
        program("worker", folder, "--uds", str(scratch / "a.sock"), *flags),
        program("worker", folder, "--uds", str(scratch / "b.sock"), *flags, *foreign),
    ):
        yield [f"unix:{scratch}/a.sock", f"tokenspeed://127.0.0.1:{port}"]


@contextlib.asynccontextmanager
async def fleet(workers: list[str], folder: Path, policy: str) -> AsyncIterator[Fleet]:
    server, port = VllmServer(), free_port()
    server.names, server.root, server.sources = [NAME], str(folder), {}
    server.metrics = re.sub(r"(_(?:running|waiting)\{.*\}) .*", r"\1 0.0", server.metrics)  # as idle as the others
    server.render = rendered(kwargs_data(bytes(4 * PATCH_WIDTH), (4, PATCH_WIDTH), (1, 2, 2)))
    server.script = script([7] * NUM_TOKENS)
    async with listening(server) as url:
        urls = (*workers, url)
        words = [word for each in urls for word in ("--worker-url", each)]
        flags = ("--port", str(port), "--decode-processes", "1", "--routing-policy", policy)
        with program("gateway", *words, *flags) as process:
            made = Fleet(Server(port, process), server, urls)  # type: ignore[arg-type]
            await asyncio.to_thread(made.gateway.wait_until_ready, 180)
            await asyncio.to_thread(wait_until, lambda: set(made.placed("saccade_worker_ready")) == set(urls))
            yield made


def script(token_ids: list[int]) -> list[Any]:
    return [*(event(one) for one in token_ids[:-1]), event(token_ids[-1], reason="length"), usage()]


async def test_requests_spread_and_answers_are_equal(
    workers: list[str], network_folder: Callable[[str], Path]
) -> None:  # E8 F9
    asked = (random_image(96, 128, 1), "What is it?")
    async with fleet(workers, network_folder("qwen3_vl"), "round_robin") as running:
        answers = dict([await running.ask(*asked) for _ in range(3)])
        assert set(answers) == set(running.urls)
        native, foreign, _ = (answers[url].choices[0].token_ids for url in running.urls)
        assert native == foreign
        running.vllm.script = script(native)
        texts = {(await running.ask(*asked))[1].choices[0].message.content for _ in range(3)}
        assert texts == {answers[running.urls[0]].choices[0].message.content}
        # The prompt that a worker of vLLM's gets is the one that the others get.
        assert running.vllm.requests[-1]["token_ids"] == answers[running.urls[0]].prompt_token_ids


async def test_repeats_go_to_the_holder_of_any_kind(
    workers: list[str], network_folder: Callable[[str], Path]
) -> None:  # E8 F9
    async with fleet(workers, network_folder("qwen3_vl"), "cost") as running:
        placed: dict[str, tuple[Part, ...]] = {}
        for seed in range(MAX_TRIES):
            asked = (f"{seed} is the number of this image:", random_image(96, 128, 100 + seed), "What is it?")
            worker, _ = await running.ask(*asked)
            placed[worker] = asked
            if len(placed) == len(running.urls):
                break
        assert set(placed) == set(running.urls)
        for worker, asked in placed.items():
            repeated, answer = await running.ask(*asked)
            assert repeated == worker
            assert answer.usage.prompt_tokens_details.cached_tokens > 0


async def test_request_refused_by_one_kind_goes_to_another(
    workers: list[str], network_folder: Callable[[str], Path]
) -> None:  # F9
    async with fleet(workers, network_folder("qwen3_vl"), "round_robin") as running:
        native, _, vllm = running.urls
        running.vllm.script = [*(event(7, index=index, reason="length") for index in range(2)), usage()]
        two = {(await running.ask("Hello?", n=2, seed=number))[0] for number in range(6)}
        assert two == {native, vllm}
        only = {(await running.ask("Hello?", extra_body={"prompt_logprobs": 1}))[0] for _ in range(3)}
        assert only == {native}
    # A gateway without a worker that can says what cannot be asked for.
    port = free_port()
    with program("gateway", "--worker-url", workers[1], "--port", str(port), "--decode-processes", "1") as process:
        gateway = Server(port, process)
        await asyncio.to_thread(gateway.wait_until_ready, 60)
        with gateway.client() as client, pytest.raises(openai.BadRequestError, match="`n` is not served"):
            client.chat.completions.create(model=NAME, messages=openai_messages("Hello?"), n=2)
