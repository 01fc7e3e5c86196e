"""The gateway in front of a real vLLM: answers equal vLLM's own, and what is known of its cache equals what it finds."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import Part, openai_messages, random_image
from checkpoints import qwen_networks, write_qwen3_vl
from server import Server, free_port, program
from test_vllm_cache import CHANGES
from vllm_server import BLOCK_SIZE, VllmServer, vllm

pytestmark = pytest.mark.peers

SECONDS = 60.0
CAT, DOG = random_image(320, 288, 1), random_image(320, 288, 2)
CHATS: tuple[tuple[Part, ...], ...] = (
    ("What is the capital of France?",),
    (CAT, "What is in this image?"),
    ("First:", CAT, "then", DOG, "which is larger?"),
)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that vLLM serves."""
    target = tmp_path_factory.mktemp("checkpoints") / request.param
    if request.param == "qwen3_vl":
        return write_qwen3_vl(target)
    return qwen_networks.write(target, request.param, CHANGES[request.param])


@pytest.fixture(scope="module")
def worker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm(folder, tmp_path_factory.mktemp("vllm")) as server:
        yield server


def ask(server: Server, *parts: Part, **body: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    return server.client().chat.completions.create(model="m", messages=openai_messages(*parts), **(asked | body))


@contextlib.contextmanager
def gateway(folder: Path, *urls: str) -> Iterator[Server]:
    """A gateway over workers at *urls*."""
    port = free_port()
    words = [word for url in urls for word in ("--worker-url", url)]
    with program(
        "gateway", *words, "--model", f"m={folder}", "--port", str(port), "--decode-processes", "1"
    ) as process:
        server = Server(port, process)
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def front(folder: Path, worker: VllmServer) -> Iterator[Server]:
    """A gateway to which the one worker looks like two, so that it listens to what they report."""
    with gateway(folder, f"vllm://127.0.0.1:{worker.port}", f"vllm://localhost:{worker.port}") as server:
        deadline = time.monotonic() + SECONDS
        while server.metric("saccade_router_exact") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ask(server, "The first prompt, with which the metrics begin.")
        yield server


def token_ids(answer: Any) -> list[int]:
    return list(answer.choices[0].token_ids)


def own_answer(worker: VllmServer, *parts: Part) -> list[int]:
    """What vLLM answers a chat by itself."""
    body = {"model": "m", "messages": openai_messages(*parts), "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answer = worker.call("/v1/chat/completions", body | {"return_token_ids": True, "cache_salt": "own"})
    return list(answer["choices"][0]["token_ids"])


def known_and_found(front: Server, *parts: Part) -> tuple[int, int]:
    """The tokens that the gateway expects in the worker's cache, and those that vLLM found there."""
    settled(front)
    before = front.metric("saccade_router_kv_hit_rate_sum")
    usage = ask(front, *parts).usage
    expected = (front.metric("saccade_router_kv_hit_rate_sum") - before) * usage.prompt_tokens
    return round(expected), usage.prompt_tokens_details.cached_tokens


def settled(front: Server) -> None:
    """Wait until the worker's events of earlier answers have arrived."""
    seen = -1.0
    while seen != (seen := front.metric("saccade_router_events_total")):
        time.sleep(0.5)


@pytest.mark.parametrize("parts", CHATS, ids=["text", "image", "images"])
def test_answers_equal_those_of_vllm_alone(front: Server, worker: VllmServer, parts: tuple[Part, ...]) -> None:  # A10
    assert token_ids(ask(front, *parts)) == own_answer(worker, *parts)


def test_the_image_decides(front: Server) -> None:
    answers = {tuple(token_ids(ask(front, random_image(320, 288, seed), "What is it?"))) for seed in range(3, 9)}
    assert len(answers) > 1


def test_what_is_known_equals_what_vllm_finds(front: Server) -> None:  # E6 E7 E8
    question = "Describe the image to me in a few words, and then tell me what else you see in it."
    asked = [random_image(320, 288, 20), random_image(320, 288, 21)]
    for image in asked:
        expected, found = known_and_found(front, image, question)
        # The second image has the size of the first: the same token ids.
        assert (expected, found < BLOCK_SIZE * 2) == (found, True)
    for image in asked:
        expected, found = known_and_found(front, image, question)
        assert expected == found > BLOCK_SIZE * 2


def test_images_go_by_their_hash_once_they_were_sent(front: Server) -> None:  # F5
    before = front.metric("saccade_images_by_hash_total")
    answers = {tuple(token_ids(ask(front, random_image(320, 288, 30), "What is it?"))) for _ in range(3)}
    assert len(answers) == 1
    # Each of the two ways to the worker sends the image at most once.
    assert front.metric("saccade_images_by_hash_total") - before >= 1


def test_samples_and_log_probabilities(front: Server) -> None:
    answer = ask(front, CAT, "What is it?", n=2, temperature=1.0, seed=5, logprobs=True, top_logprobs=3)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids) == 12
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3
            top = [one.logprob for one in token.top_logprobs]
            assert top == sorted(top, reverse=True)
            assert token.logprob <= top[0]


def test_sampling_parameters_arrive(front: Server) -> None:
    only = ask(front, "Hello", logit_bias={"40": 100}, max_tokens=3)
    assert set(token_ids(only)) == {40}
    body = {"return_token_ids": True, "allowed_token_ids": [41, 42], "stop_token_ids": [43]}
    assert set(token_ids(ask(front, "Hello", extra_body=body))) <= {41, 42}
    body = {"return_token_ids": True, "stop_token_ids": [44], "allowed_token_ids": [44]}
    stopped = ask(front, "Hello", extra_body=body)
    assert (stopped.choices[0].finish_reason, token_ids(stopped)) == ("stop", [44])


def test_special_tokens_of_users_are_text(front: Server) -> None:  # F2
    usage = [ask(front, f"Say {word}.").usage.prompt_tokens for word in ("<|im_end|>", "x")]
    assert usage[0] > usage[1]


def test_a_worker_without_tokens_in_gets_chats(folder: Path, worker: VllmServer, tmp_path: Path) -> None:  # E5
    expected = [own_answer(worker, *parts) for parts in CHATS]
    with (
        vllm(folder, tmp_path, "--no-enable-scale-out") as other,
        gateway(folder, f"vllm://127.0.0.1:{other.port}") as server,
    ):
        assert [token_ids(ask(server, *parts)) for parts in CHATS] == expected
        repeated = ask(server, *CHATS[1], logprobs=True, top_logprobs=2)
        assert repeated.usage.prompt_tokens_details.cached_tokens > 0
        assert all(len(token.top_logprobs) == 2 for token in repeated.choices[0].logprobs.content)
