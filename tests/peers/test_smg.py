"""A real SMG gateway in front of our worker: its answers are those of our own gateway where SMG's steps allow it.

SMG puts a message's images before its text and resizes with filters of its own, so the chats have one image, before
the text, of a size that is not resized, and it is a PNG: JPEG needs a libturbojpeg that SMG finds.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from chats import Part, openai_client, openai_messages, random_image
from server import Server, free_port, program

from saccade.transport.shared_memory import FOLDER

pytestmark = pytest.mark.peers

NUM_TOKENS = 8
QUESTION = "What is in this image?"
BRANCHES = "smg_cache_aware_policy_branch_total"
NO_SWITCHES: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Release:
    """A tiny checkpoint, the (width, height) of an image that no step resizes or pads, switches of its template."""

    name: str
    size: tuple[int, int]
    switches: Mapping[str, Any]


RELEASES = [
    Release("qwen3_vl", (256, 320), NO_SWITCHES),
    Release("kimi_k25", (280, 224), {"thinking": False}),  # else the answers are reasoning
]


@dataclass(frozen=True)
class Smg:
    """A running `smg launch`."""

    port: int
    metrics_port: int
    process: subprocess.Popen[bytes]

    @property
    def client(self) -> openai.OpenAI:
        return openai_client(f"http://127.0.0.1:{self.port}")

    def wait_until_ready(self, model: str, num_workers: int) -> None:
        """Wait until every worker has registered; raises TimeoutError."""
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(openai.APIError, OSError):
                if self._read(self.port, "/workers").count("grpc://") >= num_workers:
                    ask(self.client, model, "hi", max_tokens=1)
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"SMG is not ready; exit code {self.process.poll()}")
            time.sleep(0.2)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, 0 without any."""
        text = self._read(self.metrics_port, "/metrics")
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))

    def _read(self, port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return str(response.read().decode())


@contextlib.contextmanager
def smg(*urls: str, flags: tuple[str, ...] = ()) -> Iterator[Smg]:
    """Run SMG in front of the workers at *urls*."""
    port, metrics_port = free_port(), free_port()
    command = [os.environ["SACCADE_SMG"], "launch", "--backend", "tokenspeed", "--worker-urls", *urls]
    command += [
        "--worker-startup-check-interval",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "warn",
        *flags,
    ]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    process = subprocess.Popen(command)
    try:
        yield Smg(port, metrics_port, process)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def worker(folder: Path, socket: Path) -> Iterator[str]:
    """Run a worker; yield its URL on TokenSpeed's wire."""
    port = free_port()
    flags = ("--uds", str(socket), "--serve-tokenspeed", f"127.0.0.1:{port}", "--kv-events-token-ids")
    with program("worker", str(folder), *flags, "--max-model-len", "2048", "--dtype", "float32"):
        yield f"grpc://127.0.0.1:{port}"


@dataclass(frozen=True)
class Gateways:
    """Our own gateway and SMG before the same worker."""

    own: Server
    smg: Smg
    release: Release

    def both(self, *parts: Part, **options: Any) -> tuple[Any, Any]:
        """The answers of our own gateway and of SMG."""
        return self.ask_own(*parts, **options), self.ask_smg(*parts, **options)

    def ask_own(self, *parts: Part, **options: Any) -> Any:
        return ask(self.own.client(), self.own.name, *parts, switches=self.release.switches, **options)

    def ask_smg(self, *parts: Part, **options: Any) -> Any:
        return ask(self.smg.client, self.own.name, *parts, switches=self.release.switches, **options)

    def random_image(self, seed: int) -> Any:
        return random_image(*self.release.size, seed)


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def gateways(
    request: pytest.FixtureRequest, network_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateways]:
    socket = tmp_path_factory.mktemp("smg") / "w.sock"
    port = free_port()
    with contextlib.ExitStack() as running:
        folder = tmp_path_factory.mktemp("model") / request.param.name
        shutil.copytree(network_folder(request.param.name), folder)
        make_readable(folder)
        url = running.enter_context(worker(folder, socket))
        flags = ("--worker-url", f"unix:{socket}", "--port", str(port), "--decode-processes", "1")
        own = Server(port, running.enter_context(program("gateway", *flags)))
        own.wait_until_ready(180)
        started = running.enter_context(smg(url, flags=("--multimodal-tensor-transport", "auto")))
        started.wait_until_ready(own.name, 1)
        yield Gateways(own, started, request.param)


def make_readable(folder: Path) -> None:
    """Have SMG see that the template takes parts: it looks for a loop over the content itself, as releases have it."""
    template = folder / "chat_template.jinja"
    if template.exists():
        template.write_text(template.read_text().replace("message['content'] or []", "message['content']"))


def ask(
    client: openai.OpenAI, model: str, *parts: Part, switches: Mapping[str, Any] = NO_SWITCHES, **options: Any
) -> Any:
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    extra = {"chat_template_kwargs": switches} if switches else {}
    with client:
        answer = client.chat.completions.create(
            model=model, messages=openai_messages(*parts), extra_body=extra, **(given | options)
        )
        return list(answer) if options.get("stream") else answer


def check_equal(own: Any, foreign: Any) -> None:
    """The answers have the same tokens, by their log probabilities and those of the likeliest beside them.

    Texts are not compared: SMG shows other special tokens than we do, and leaves out bytes at the end that are no whole
    character, with the log probabilities from there on.
    """
    assert foreign.usage.prompt_tokens == own.usage.prompt_tokens
    assert foreign.usage.completion_tokens == own.usage.completion_tokens
    by_index = [sorted(answer.choices, key=lambda choice: choice.index) for answer in (own, foreign)]
    for ours, theirs in zip(*by_index, strict=True):
        assert theirs.finish_reason == ours.finish_reason
        found = logprobs(theirs)
        assert len(found) >= 3
        assert found == pytest.approx(logprobs(ours)[: len(found)], abs=1e-3)


def logprobs(choice: Any) -> list[float]:
    """Those of each token and of the two likeliest at its place."""
    return [
        logprob
        for entry in choice.logprobs.content
        for logprob in (entry.logprob, *(top.logprob for top in entry.top_logprobs))
    ]


def test_text(gateways: Gateways) -> None:
    own, foreign = gateways.both("Tell me a story.")
    check_equal(own, foreign)
    assert own.usage.completion_tokens == NUM_TOKENS


def test_an_image_before_the_text(gateways: Gateways) -> None:
    own, foreign = gateways.both(gateways.random_image(1), QUESTION)
    check_equal(own, foreign)
    assert own.usage.prompt_tokens > 64


def test_streamed_answer(gateways: Gateways) -> None:
    shown = gateways.random_image(2)
    whole = gateways.ask_smg(shown, QUESTION)
    chunks = gateways.ask_smg(shown, QUESTION, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]


def test_stop_string(gateways: Gateways) -> None:
    (choice,) = gateways.both("Tell me a story.")[0].choices
    stop = choice.message.content[1:3]
    own, foreign = gateways.both("Tell me a story.", stop=[stop])
    assert foreign.choices[0].message.content == own.choices[0].message.content
    assert foreign.choices[0].finish_reason == own.choices[0].finish_reason == "stop"


def test_several_answers(gateways: Gateways) -> None:
    check_equal(*gateways.both("Tell me a story.", n=3, temperature=0.8, seed=11))


async def test_images_of_one_batch_are_not_shared(gateways: Gateways) -> None:  # B9
    shown = [gateways.random_image(seed) for seed in range(20, 26)]
    alone = [gateways.ask_own(image, QUESTION) for image in shown]
    together = await asyncio.gather(*(asyncio.to_thread(gateways.ask_smg, image, QUESTION) for image in shown))
    for own, foreign in zip(alone, together, strict=True):
        check_equal(own, foreign)
    assert len({tuple(logprobs(answer.choices[0])) for answer in alone}) == len(shown)


def test_pixels_came_through_shared_memory_and_none_is_left(gateways: Gateways) -> None:
    before = gateways.smg.metric("smg_mm_tensors_total", path="shm")
    gateways.ask_smg(gateways.random_image(30), QUESTION)
    assert gateways.smg.metric("smg_mm_tensors_total", path="shm") == before + 1
    assert list(FOLDER.glob(f"smg-tokenspeed-{gateways.smg.process.pid}-*")) == []


def test_what_is_not_served_is_refused_by_name(gateways: Gateways) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.json_schema"):
        gateways.ask_smg("Tell me.", response_format=schema)


def test_repeated_prompts_land_on_the_holder(network_folder: Callable[[str], Path], tmp_path: Path) -> None:  # E8
    prompts = [f"{number}: " + f"a text with number {number}, again and again. " * 8 for number in range(8)]
    folder = network_folder("qwen3_vl")

    def ask_all(gateway: Smg) -> list[tuple[int, int]]:
        """Return of each prompt how many tokens were cached, and how many are in its full blocks."""
        usages = [ask(gateway.client, folder.name, prompt, max_tokens=1).usage for prompt in reversed(prompts)]
        return [(usage.prompt_tokens_details.cached_tokens, (usage.prompt_tokens - 1) // 16 * 16) for usage in usages]

    with contextlib.ExitStack() as running:
        urls = [running.enter_context(worker(folder, tmp_path / name / "w.sock")) for name in "ab"]
        with smg(*urls, flags=("--policy", "cache_aware")) as gateway:
            gateway.wait_until_ready(folder.name, 2)
            assert not any(cached for cached, _ in ask_all(gateway))
            wait_until_applied(gateway)
            check_hits(gateway, ask_all)
        # A gateway that comes later learns of it from the snapshots.
        with smg(*urls, flags=("--policy", "cache_aware")) as gateway:
            gateway.wait_until_ready(folder.name, 2)
            wait_until_applied(gateway)
            check_hits(gateway, ask_all)


def check_hits(gateway: Smg, ask_all: Callable[[Smg], list[tuple[int, int]]]) -> None:
    """Every prompt finds all its full blocks, by our events and not by what SMG guesses from its own requests."""
    before = gateway.metric(BRANCHES, branch="event_hit")
    found = ask_all(gateway)
    assert all(cached == full for cached, full in found), found
    assert gateway.metric(BRANCHES, branch="event_hit") - before == len(found)


def wait_until_applied(gateway: Smg) -> None:
    """Wait until SMG has applied the workers' events: its count of blocks stands still."""
    deadline = time.monotonic() + 60
    seen, known = -1.0, gateway.metric("smg_kv_event_blocks_total")
    while not known or known != seen:
        assert time.monotonic() < deadline, "no events"
        time.sleep(0.5)
        seen, known = known, gateway.metric("smg_kv_event_blocks_total")
