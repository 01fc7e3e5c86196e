"""Processes die; requests are answered all the same, and nothing is left behind."""

import concurrent.futures
import os
import signal
import time
from pathlib import Path

import openai
import psutil
import pytest
from chats import openai_messages, picture
from server import Server, serving, slots


def long_answer(server: Server) -> str:
    # An exception keeps this frame, and so the client, alive; its socket must not wait for the collector.
    with server.client(timeout=60) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=openai_messages(picture(96, 96, 1), "Go on."),
            max_tokens=3000,
            extra_body={"ignore_eos": True},
        )
    return str(answer.choices[0].finish_reason)


def wait_for(condition: object, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


@pytest.fixture
def server(tiny_qwen3_vl: Path) -> object:
    """A server of its own for each test: these tests break it."""
    with serving(str(tiny_qwen3_vl), "--served-model-name", "tiny", "--max-model-len", "4096") as running:
        yield running


def test_killed_engine_fails_running_requests_and_comes_back(server: Server) -> None:
    first = server.engine()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        running = [threads.submit(long_answer, server) for _ in range(2)]
        wait_for(lambda: server.metric("vllm:num_requests_running") == 2)
        first.kill()
        for request in running:
            with pytest.raises(openai.APIStatusError) as failure:
                request.result()
            assert failure.value.status_code >= 500
            assert failure.value.code == "worker_failed"
    server.wait_until_ready()
    assert server.engine().pid != first.pid
    answer = server.client().chat.completions.create(
        model="tiny", messages=openai_messages(picture(96, 96, 1), "Hello?"), max_tokens=4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_client_that_leaves_frees_the_engine(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model="tiny",
        messages=openai_messages(picture(96, 96, 1), "Go on."),
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("saccade_slots_in_use") == 0


def test_interrupt_leaves_no_process_and_no_segment(server: Server) -> None:
    tree = server.tree()
    server.client().chat.completions.create(
        model="tiny", messages=openai_messages(picture(96, 96, 1), "Hello?"), max_tokens=1
    )
    assert slots(tree)
    assert len(tree) >= 4  # supervisor, gateway, worker, engine, decode processes
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(30) == 0
    assert psutil.wait_procs(tree, timeout=5)[1] == []
    assert not slots(tree)


def test_supervisor_that_is_killed_takes_everything_with_it(server: Server) -> None:
    tree = server.tree()
    server.process.kill()
    assert psutil.wait_procs(tree, timeout=15)[1] == []
