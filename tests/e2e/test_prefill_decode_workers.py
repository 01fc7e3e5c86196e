"""A gateway over prefill and decode workers, as a user starts them: equal answers, faults, and two hosts. [eng] 16, 40"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import hosts
import openai
import psutil
import pytest
from chats import openai_messages, random_image
from server import Server, free_port, program, slots
from waiting import wait_until

pytestmark = pytest.mark.conformance

FLAGS = ("--max-model-len", "1024", "--max-num-seqs", "8", "--dtype", "float32", "--served-model-name", "tiny")
SEEDS = (0, 1, 2, 3)
START_SECONDS = 240
"""Of two workers and a gateway at once."""

NOT_SERVED = {"worker_failed", "worker_unavailable"}


@dataclass
class Split:
    """A gateway over a prefill worker and a decode worker, which are programs by role."""

    server: Server
    workers: dict[str, psutil.Process]
    urls: dict[str, str]

    def counted(self, name: str) -> dict[str, float]:
        """A metric of each worker, by role."""
        return {role: self.server.metric(name, worker=url) for role, url in self.urls.items()}

    def engine(self, role: str) -> psutil.Process:
        """The engine's process of a worker."""
        found = self.workers[role].children(recursive=True)
        return next(process for process in found if "saccade.engine" in process.cmdline())

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.server.metric("saccade_worker_ready") == 2)

    def wait_until_idle(self) -> None:
        """Nothing of any request is left at either worker."""

        def is_idle() -> bool:
            counts = [self.counted(f"vllm:num_requests_{state}") for state in ("running", "waiting")]
            free, blocks = self.counted("saccade_kv_blocks_free"), self.counted("saccade_kv_blocks")
            return not any(count for each in counts for count in each.values()) and free == blocks

        wait_until(is_idle)


def ask(server: Server, number: int, max_tokens: int = 24, **options: object) -> list[str]:
    """Ask about an image, or with *number* 0 a text; return the texts of all choices."""
    shown = (random_image(96, 96, number),) if number else ()
    with server.client(timeout=90) as client:
        answer = client.chat.completions.create(
            model=server.name,
            messages=openai_messages(*shown, f"What is it? {number}"),
            max_tokens=max_tokens,
            **{"temperature": 0, "extra_body": {"ignore_eos": True}, **options},
        )
    return [str(choice.message.content) for choice in answer.choices]


def outcome(server: Server, seed: int, max_tokens: int) -> str | list[str]:
    """What ask() returns, or the code of its error."""
    try:
        return ask(server, seed, max_tokens)
    except openai.APIStatusError as error:
        return str(error.code)


@contextlib.contextmanager
def split_of(
    folder: Path, model: Path, before: dict[str, tuple[str, ...]] | None = None, bind: str = "127.0.0.1:0"
) -> Iterator[Split]:
    """The three programs; each worker runs by the command *before* of its role."""
    urls = {role: f"unix:{folder / role}/w.sock" for role in ("prefill", "decode")}
    with contextlib.ExitStack() as running:
        workers = {}
        for role, url in urls.items():
            transfer = ("--kv-transfer-bind", bind) if role == "prefill" else ()
            flags = ("--uds", url.removeprefix("unix:"), "--role", role, *transfer, *FLAGS)
            start = program("worker", str(model), *flags, before=(before or {}).get(role, ()))
            workers[role] = psutil.Process(running.enter_context(start).pid)
        port = free_port()
        flags = (*(f"--worker-url={url}" for url in urls.values()), "--port", str(port), "--decode-processes", "1")
        server = Server(port, running.enter_context(program("gateway", *flags)))
        server.wait_until_ready(START_SECONDS)
        split = Split(server, workers, urls)
        split.wait_until_ready()
        yield split


@pytest.fixture(scope="module")
def split(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with split_of(tmp_path_factory.mktemp("split"), tiny_qwen3_vl) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tiny_server: Server) -> Callable[..., list[str]]:
    """What one worker answers."""
    return lambda *arguments, **options: ask(tiny_server, *arguments, **options)


def test_answers_equal_one_workers(alone: Callable[..., list[str]], split: Split) -> None:
    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(lambda seed: ask(split.server, seed), SEEDS * 2))
    assert told == [alone(seed) for seed in SEEDS] * 2
    several = {"n": 3, "temperature": 1.2, "seed": 7}
    assert ask(split.server, 1, 8, **several) == alone(1, 8, **several)
    split.wait_until_idle()
    images = split.counted("saccade_encoded_items_total")
    assert images["prefill"] >= len(SEEDS) - 1
    assert images["decode"] == 0
    assert split.counted("vllm:prompt_tokens_total")["decode"] == 0
    tokens = split.counted("vllm:generation_tokens_total")
    assert tokens["prefill"] == 2 * len(SEEDS) + 3
    assert tokens["decode"] == 2 * len(SEEDS) * 23 + 3 * 7


def test_disconnected_client_leaves_nothing(split: Split) -> None:
    with split.server.client(timeout=60) as client:
        for seed in range(10, 14):
            stream = client.chat.completions.create(
                model=split.server.name,
                messages=openai_messages(random_image(96, 96, seed), "What is it?"),
                max_tokens=500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            if seed % 2:
                next(iter(stream))
            stream.close()
    split.wait_until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_dead_engine_fails_its_requests(split: Split, alone: Callable[..., list[str]], role: str) -> None:
    """No answer is wrong, errors are named, and service returns. The other worker serves alone meanwhile."""
    right = {seed: alone(seed, 200) for seed in SEEDS}
    split.wait_until_ready()
    with ThreadPoolExecutor(8) as threads:
        asked = [(seed, threads.submit(outcome, split.server, seed, 200)) for seed in SEEDS * 3]
        wait_until(lambda: any(split.counted("vllm:num_requests_running").values()))
        dead = split.engine(role)
        dead.send_signal(signal.SIGKILL)
        told = [(seed, each.result()) for seed, each in asked]
    assert all(answer == right[seed] or answer in NOT_SERVED for seed, answer in told), told
    assert ask(split.server, 1, 200) == right[1]
    split.wait_until_ready()
    split.wait_until_idle()
    assert not slots([dead])
    assert ask(split.server, 2, 200) == right[2]
    split.wait_until_idle()


def test_workers_on_two_hosts_answer(tiny_qwen3_vl: Path, tmp_path: Path, alone: Callable[..., list[str]]) -> None:
    """Each worker has a network and a /dev/shm of its own; pixels and state go over connections."""
    with hosts.two_hosts() as (first, second):
        before = {"prefill": first, "decode": second}
        with split_of(tmp_path, tiny_qwen3_vl, before, f"{hosts.ADDRESSES[0]}:0") as split:
            for seed in SEEDS:
                assert ask(split.server, seed) == alone(seed)
            assert split.counted("saccade_encoded_items_total")["decode"] == 0
            split.wait_until_idle()
