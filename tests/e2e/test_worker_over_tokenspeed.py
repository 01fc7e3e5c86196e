"""One worker over both of its wires: a gateway over TokenSpeed's gets the answers of one over Saccade's own."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chats import Part, openai_messages, random_image
from server import Server, free_port, program

pytestmark = pytest.mark.conformance

NUM_TOKENS = 8
CHATS: dict[str, tuple[Part, ...]] = {
    "text": ("What is it?",),
    "an image": (random_image(96, 128, 1), "What is it?"),
    "two images between texts": ("First:", random_image(150, 100, 2), "then", random_image(57, 203, 3), "which is it?"),
}


@dataclass(frozen=True)
class Wires:
    """Two gateways of one worker."""

    native: Server
    tokenspeed: Server


@pytest.fixture(scope="module", params=["qwen3_vl", "kimi_k25"])
def wires(
    request: pytest.FixtureRequest,
    network_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Wires]:
    folder = network_folder(request.param)
    socket, port = tmp_path_factory.mktemp("wires") / "w.sock", free_port()
    flags = ("--uds", str(socket), "--serve-tokenspeed", f"127.0.0.1:{port}", "--max-model-len", "1024")
    with contextlib.ExitStack() as running:
        running.enter_context(program("worker", str(folder), *flags, "--dtype", "float32"))
        servers = [running.enter_context(gateway(url)) for url in (f"unix:{socket}", f"tokenspeed://127.0.0.1:{port}")]
        for server in servers:
            server.wait_until_ready(180)
        yield Wires(*servers)


@contextlib.contextmanager
def gateway(url: str) -> Iterator[Server]:
    port = free_port()
    with program("gateway", "--worker-url", url, "--port", str(port), "--decode-processes", "1") as process:
        yield Server(port, process)


def ask(server: Server, *parts: Part, **options: Any) -> Any:
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    with server.client() as client:
        return client.chat.completions.create(
            model=server.name,
            messages=openai_messages(*parts),
            extra_body={"return_token_ids": True, "ignore_eos": True},
            **(given | options),
        )


def said(answer: Any) -> tuple[Any, ...]:
    """What an answer says: ids of the prompt and of the answer, text, log probabilities."""
    (choice,) = answer.choices
    assert choice.logprobs is not None
    logprobs = [(entry.token, entry.logprob) for entry in choice.logprobs.content]
    return answer.prompt_token_ids, choice.token_ids, choice.message.content, choice.finish_reason, logprobs


@pytest.mark.parametrize("parts", CHATS.values(), ids=CHATS.keys())
def test_answers_are_equal(wires: Wires, parts: tuple[Part, ...]) -> None:  # E8
    native, foreign = (said(ask(server, *parts)) for server in (wires.native, wires.tokenspeed))
    assert foreign == native
    assert len(native[1]) == NUM_TOKENS


async def test_images_of_one_batch_are_not_shared(wires: Wires) -> None:  # B9
    shown = [random_image(96, 128, seed) for seed in range(20, 26)]
    alone = [said(ask(wires.native, image, "What is it?")) for image in shown]
    together = await asyncio.gather(
        *(asyncio.to_thread(ask, wires.tokenspeed, image, "What is it?") for image in shown)
    )
    assert [said(answer)[:4] for answer in together] == [answer[:4] for answer in alone]
    assert len({tuple(answer[1]) for answer in alone}) > 1


def test_sampled_answers_are_equal(wires: Wires) -> None:
    options = {"temperature": 0.9, "seed": 7, "top_p": 0.8}
    native, foreign = (said(ask(server, "Tell me.", **options)) for server in (wires.native, wires.tokenspeed))
    assert foreign == native


def test_a_repeated_prompt_is_cached(wires: Wires) -> None:
    asked = (random_image(96, 128, 40), "A question that is long enough for a block of tokens, or for two of them?")
    first, second = (ask(wires.tokenspeed, *asked) for _ in range(2))
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second)]
    assert cached[0] == 0
    assert cached[1] > 0
