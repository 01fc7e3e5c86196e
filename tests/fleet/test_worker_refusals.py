"""A request that one kind of worker cannot serve goes to one that can; it is refused only where none can."""

import asyncio
from dataclasses import replace
from random import Random

import msgspec
import pytest
from fronts import DESCRIPTION
from stub_worker import StubWorker, stub

from saccade.errors import ContextLengthExceeded, UnsupportedParameter, WorkerUnavailable
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.report import route_report
from saccade.fleet.router import Router
from saccade.fleet.settings import DispatchLimits
from saccade.identity.blocks import MediaRun
from saccade.protocol.needs import Need
from saccade.protocol.request import SamplingParams

MODEL = DESCRIPTION.model
SHORT = msgspec.structs.replace(DESCRIPTION, max_model_len=128)
TEXT = Prompt(list(range(100)))
IMAGE = Prompt(list(range(100)), (MediaRun(20, 50, b"h" * 32),))
SEVERAL = Prompt(list(range(100)), num_samples=2)
FITTING = Prompt(list(range(100)), sampling=SamplingParams(max_tokens=28))
LONG = Prompt(list(range(100)), sampling=SamplingParams(max_tokens=29))


def refusing() -> StubWorker:
    """A worker that takes no images and one answer at a time."""
    refusals = {
        Need.SEVERAL_ANSWERS: UnsupportedParameter("No `n` here.", "n"),
        Need.IMAGES: UnsupportedParameter("No images here.", "messages"),
    }
    return stub("tokenspeed://a:1", DESCRIPTION, refusals=refusals)


def dispatcher(*workers: StubWorker, queue: int = 64) -> tuple[WorkerPool, Dispatcher]:
    worker_pool = WorkerPool((), lambda _: None)
    for worker in workers:
        worker_pool.add(worker)
    router = Router("round_robin", BlockIndex(1 << 20), Random(0))
    return worker_pool, Dispatcher(worker_pool, router, limits=DispatchLimits(worker_queue=queue))


async def placed(over: Dispatcher, prompt: Prompt, times: int = 4) -> set[str]:
    found = set()
    for _ in range(times):
        async with over.place(MODEL, prompt) as placement:
            found.add(placement.worker.url)
    return found


@pytest.mark.parametrize("prompt", [IMAGE, SEVERAL], ids=["images", "n"])
async def test_request_refused_by_one_kind_goes_to_another(prompt: Prompt) -> None:  # F9
    _, over = dispatcher(refusing(), stub("unix:/b", DESCRIPTION))
    assert await placed(over, TEXT) == {"tokenspeed://a:1", "unix:/b"}
    assert await placed(over, prompt) == {"unix:/b"}


async def test_request_is_refused_if_no_ready_worker_can_serve_it() -> None:  # F9
    able = stub("unix:/b", DESCRIPTION)
    worker_pool, over = dispatcher(refusing(), able)
    able.become(ready=False)
    with pytest.raises(UnsupportedParameter, match="No `n` here") as failure:
        await placed(over, SEVERAL)
    assert failure.value.param == "n"
    able.become(ready=True)
    worker_pool.changed(able)
    await asyncio.sleep(0)
    with pytest.raises(UnsupportedParameter):
        async with over.place(MODEL, replace(SEVERAL, excluded={"unix:/b"})):
            pass
    with pytest.raises(WorkerUnavailable):
        async with over.place(MODEL, replace(SEVERAL, excluded={"unix:/b", "tokenspeed://a:1"})):
            pass


async def test_a_context_that_is_too_short_is_passed_over() -> None:
    _, over = dispatcher(stub("vllm://a:1", SHORT), stub("unix:/b", DESCRIPTION))
    assert await placed(over, FITTING) == {"vllm://a:1", "unix:/b"}
    assert await placed(over, LONG) == {"unix:/b"}
    _, alone = dispatcher(stub("vllm://a:1", SHORT))
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 128"):
        await placed(alone, LONG)


async def test_the_operator_sees_why() -> None:
    worker_pool, over = dispatcher(refusing(), stub("unix:/b", DESCRIPTION))
    preview = await over.preview(MODEL, IMAGE)
    listener = CacheListener(WorkerPool((), lambda _: None), Router("auto", BlockIndex(1), Random(0)))
    report = route_report(preview, worker_pool, listener)
    assert report.worker == "unix:/b"
    assert [(one.worker, one.reason) for one in report.excluded] == [
        ("tokenspeed://a:1", "it cannot serve this request: No images here.")
    ]
