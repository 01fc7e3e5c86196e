"""A request whose worker fails before the first token is sent to another one, over a real gateway."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import msgspec
import pytest
import scripted
from chats import data_url, random_image
from waiting import wait_until

from saccade.errors import InvalidValue, QueueFull, WorkerFailed, WorkerUnavailable
from saccade.fleet.settings import DispatchLimits
from saccade.gateway.config import GatewayConfig
from saccade.protocol.description import ModelFiles
from saccade.protocol.output import TokenDelta

CONTENT = [
    {"type": "image_url", "image_url": {"url": data_url(random_image(64, 96, 1))}},
    {"type": "text", "text": "?"},
]


@contextmanager
def gateway_of(
    folder: Path, num_workers: int = 2, max_retries: int = 1
) -> Iterator[tuple[scripted.Gateway, list[scripted.ScriptedWorker]]]:
    """A gateway and its workers, which get requests in turn and answer two tokens."""
    config = GatewayConfig(
        routing_policy="round_robin", dispatch=DispatchLimits(max_retries=max_retries), mm_processor_cache_gb=0
    )
    with scripted.running(folder, config) as gateway:
        gateway.answer_two_tokens()
        first = gateway.worker
        others = [
            replace(
                first, url=f"grpc://scripted:{number}", requests=[], aborted=[], pixels=[], script=list(first.script)
            )
            for number in range(2, num_workers + 1)
        ]
        for other in others:
            gateway.loop.call_soon_threadsafe(gateway.worker_pool.add, other)
        wait_until(lambda: len(gateway.worker_pool.clients) == num_workers)
        yield gateway, [first, *others]


def booked(gateway: scripted.Gateway) -> int:
    return sum(work.num_requests for work in gateway.application.routing.cache_view.router.works().values())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [WorkerFailed("it died"), WorkerUnavailable("it is away")])
def test_another_worker_answers_with_the_same_image(tiny_qwen3_vl: Path, stream: bool, failure: Exception) -> None:
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, second)):
        first.script = [failure]
        answer = gateway.chat(CONTENT, stream=stream)
        assert answer.status == 200
        assert [len(worker.requests) for worker in (first, second)] == [1, 1]
        assert first.pixels == second.pixels != []
        assert first.requests[0].token_ids == second.requests[0].token_ids
        assert gateway.metric("saccade_router_retried_requests_total", model_name="tiny") == 1
        wait_until(lambda: gateway.metric("saccade_slots_in_use") == booked(gateway) == 0)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([TokenDelta("r", [300]), WorkerFailed("it died")], 500),
        ([InvalidValue("the client's fault", "messages")], 400),
        ([QueueFull("1024 requests are waiting at this worker already; try again shortly.")], 429),
    ],
)
def test_other_failures_and_later_ones_are_the_answer(
    tiny_qwen3_vl: Path, script: list[scripted.Step], status: int
) -> None:
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, second)):
        first.script = script
        assert gateway.chat(CONTENT).status == status
        assert (len(first.requests), second.requests) == (1, [])
        wait_until(lambda: gateway.metric("saccade_slots_in_use") == booked(gateway) == 0)


@pytest.mark.parametrize(("max_retries", "asked"), [(0, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1]), (9, [1, 1, 1])])
def test_retries_are_bounded_and_each_worker_is_asked_once(
    tiny_qwen3_vl: Path, max_retries: int, asked: list[int]
) -> None:
    with gateway_of(tiny_qwen3_vl, 3, max_retries) as (gateway, workers):
        for worker in workers:
            worker.script = [WorkerFailed("it died")]
        answer = gateway.chat(CONTENT)
        assert (answer.status, answer.json["error"]["code"]) == (500, "worker_failed")
        assert sorted((len(worker.requests) for worker in workers), reverse=True) == asked
        wait_until(lambda: gateway.metric("saccade_slots_in_use") == booked(gateway) == 0)


def test_a_request_that_had_one_worker_does_not_go_to_one_that_came_later(tiny_qwen3_vl: Path) -> None:
    """Its images were not kept."""
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, second)):
        second.become(ready=False)
        first.script = [go_on := Event(), WorkerFailed("it died")]
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(gateway.chat, CONTENT)
            wait_until(lambda: first.requests)
            second.become(ready=True)
            go_on.set()
            assert asked.result().json["error"]["code"] == "worker_failed"
        assert second.requests == []


def test_failure_without_another_worker_is_the_answer(tiny_qwen3_vl: Path) -> None:
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, second)):
        first.script = [go_on := Event(), WorkerFailed("it died")]
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(gateway.chat, CONTENT)
            wait_until(lambda: first.requests)
            first.become(ready=False)
            second.become(ready=False)
            go_on.set()
            assert asked.result().json["error"]["code"] == "worker_failed"
        assert second.requests == []
        wait_until(lambda: gateway.metric("saccade_slots_in_use") == booked(gateway) == 0)


def test_an_attempt_has_ended_before_the_next_begins(tiny_qwen3_vl: Path) -> None:
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, second)):
        first.script = [WorkerFailed("it died")]
        second.script = [go_on := Event(), *second.script]
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(gateway.chat, CONTENT)
            wait_until(lambda: second.requests)
            assert booked(gateway) == 1
            go_on.set()
            assert asked.result().status == 200


def test_images_are_kept_for_another_worker_until_the_first_token(tiny_qwen3_vl: Path) -> None:
    url = data_url(random_image(512, 512, 1))  # long enough to be counted
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, _)):
        first.script = [first_token := Event(), TokenDelta("r", [300]), rest := Event(), *first.script]
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(gateway.chat, [{"type": "image_url", "image_url": {"url": url}}])
            wait_until(lambda: first.requests)
            assert gateway.application.limits.memory.num_bytes > 0
            first_token.set()
            # What is left is the answer, which grows.
            wait_until(lambda: gateway.application.limits.memory.num_bytes < 100)
            assert gateway.application.limits.admission.num_requests == 1
            rest.set()
            assert asked.result().status == 200


def test_a_prompt_of_one_release_is_not_sent_to_workers_of_another(tiny_qwen3_vl: Path) -> None:
    with gateway_of(tiny_qwen3_vl) as (gateway, (first, second)):
        first.script = [go_on := Event(), WorkerFailed("it died")]
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(gateway.chat, CONTENT)
            wait_until(lambda: first.requests)
            assert second.state.description is not None
            files = dict(second.state.description.files.files)
            files["generation_config.json"] = json.dumps(
                json.loads(files["generation_config.json"]) | {"top_k": 7}
            ).encode()
            second.become(
                description=msgspec.structs.replace(
                    second.state.description, fingerprint=b"o" * 32, files=ModelFiles(files=files)
                )
            )
            first.become(ready=False)
            gateway.loop.call_soon_threadsafe(gateway.worker_pool.changed, first)
            gateway.loop.call_soon_threadsafe(go_on.set)
            assert asked.result().json["error"]["code"] == "worker_failed"
        assert second.requests == []
        wait_until(lambda: gateway.chat("Hi").status == 200)
        assert len(second.requests) == 1
