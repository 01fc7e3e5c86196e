"""Pairs of workers: which are chosen, what each leg gets, and what follows when a leg fails. [eng] 40"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from fronts import DESCRIPTION
from streams import QueueSink, no_chat, no_pixels, stream
from stub_worker import StubWorker
from tables import table

from saccade.connectors.session import slots_of
from saccade.connectors.sink import Sink, Stream
from saccade.errors import (
    InvalidValue,
    PeerFailed,
    SaccadeError,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.router import Router
from saccade.fleet.settings import DEFAULT_LIMITS, DispatchLimits
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.kv_events import BlockStored, KvEvents
from saccade.protocol.kv_transfer import ReceiveKv, SendKv
from saccade.protocol.media import MediaItem, SlotRef, Span
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels, SamplingParams
from saccade.transport import shared_memory

TOKENS = [1, 2, 3]
ADDRESS = "10.0.0.9:9"


class ScriptedWorker(StubWorker):
    """A worker of a role that raises *failures* first, one for each request, and then answers. It waits for *gate*."""

    def __init__(self, url: str, role: Any, released: list[str]) -> None:
        super().__init__(url)
        self.become(
            description=msgspec.structs.replace(
                DESCRIPTION,
                role=role,
                kv_transfer_address=ADDRESS if role == "prefill" else None,
                max_num_seqs=4,
                shm_namespace=shared_memory.readers(),
            )
        )
        self.play = self.answer
        self.released = released
        self.failures: list[SaccadeError] = []
        self.num_open = 0
        self.asks = False
        self.fails_after: int | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def generate(self, request: EngineRequest, sink: Sink, chat: object = None) -> Stream:
        self.released += slots_of(request)
        return super().generate(request, sink, chat)

    async def answer(self, request: EngineRequest, sink: Sink) -> AsyncGenerator[TokenDelta, None]:
        self.num_open += 1
        try:
            await self.gate.wait()
            if self.asks:
                brought = asyncio.get_running_loop().create_future()
                sink.pixels_wanted([0], self.url, brought.set_result)
                await brought
            if self.failures:
                raise self.failures.pop(0)
            tokens = TOKENS[: request.sampling.max_tokens]
            for number, token in enumerate(tokens):
                if number == self.fails_after:
                    raise WorkerFailed("died")
                last = number == len(tokens) - 1
                for index in range(request.num_samples):
                    yield TokenDelta(request.request_id, [token], FinishReason.LENGTH if last else None, index=index)
        finally:
            self.num_open -= 1


@dataclass
class Cluster:
    """Scripted workers behind a dispatcher."""

    dispatcher: Dispatcher
    workers: dict[str, ScriptedWorker]
    router: Router
    released: list[str]
    supplied: list[Sequence[int]] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()
    failed: list[str] = field(default_factory=list)

    def __getitem__(self, url: str) -> ScriptedWorker:
        return self.workers[url]

    async def supply(self, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        self.supplied.append(media)
        return ()

    async def answer(self, request: EngineRequest, on_token: Callable[[], object] = lambda: None) -> list[int]:
        prompt = Prompt(
            request.token_ids, sampling=request.sampling, num_samples=request.num_samples, excluded=self.excluded
        )
        async with self.dispatcher.place("m", prompt) as placement:
            tokens = []
            try:
                async with contextlib.aclosing(stream(self.dispatcher, placement, request, self.supply)) as deltas:
                    async for delta in deltas:
                        tokens += delta.token_ids
                        on_token()
            except SaccadeError:
                self.failed.append(placement.failed_worker.url)
                raise
            return tokens

    def check_idle(self) -> None:
        """No leg runs, no work is booked, and no task is left."""
        assert [worker.num_open for worker in self.workers.values()] == [0] * len(self.workers)
        assert self.dispatcher.num_requests == 0
        assert all(not any(work) for work in self.router.works().values())
        assert asyncio.all_tasks() == {asyncio.current_task()}


def cluster(limits: DispatchLimits = DEFAULT_LIMITS, **roles: str) -> Cluster:
    """A fleet of scripted workers by url."""
    released: list[str] = []
    worker_pool = WorkerPool([], released.extend)
    workers = {url: ScriptedWorker(url, role, released) for url, role in roles.items()}
    for worker in workers.values():
        worker_pool.add(worker)
    router = Router("round_robin", BlockIndex(1 << 20), Random(0))
    return Cluster(Dispatcher(worker_pool, router, limits=limits), workers, router, released)


def ask(max_tokens: int = 3, **changes: Any) -> EngineRequest:
    """A prompt with an image in a slot."""
    item = MediaItem(
        modality="image",
        content_hash=bytes(32),
        grid=(1, 2, 2),
        spans=(Span(0, 1),),
        pixel_shape=(4, 768),
        slot=SlotRef(name="slot", generation=1, nbytes=4 * 768),
    )
    params = SamplingParams(max_tokens=max_tokens, min_tokens=changes.pop("min_tokens", 0))
    return EngineRequest(request_id="r", token_ids=[1], sampling=params, media=(item,), **changes)


async def test_each_leg_gets_its_part() -> None:  # A8
    subject = cluster(p="prefill", d="decode")
    assert await subject.answer(ask(min_tokens=2)) == TOKENS
    [first], [second] = subject["p"].requests, subject["d"].requests
    assert isinstance(first.kv_transfer, SendKv)
    assert second.kv_transfer == ReceiveKv(first.kv_transfer.key, ADDRESS)
    assert (first.sampling.max_tokens, first.sampling.min_tokens) == (1, 1)
    assert (second.sampling.max_tokens, second.sampling.min_tokens) == (3, 2)
    assert first.sampling.seed == second.sampling.seed is not None
    assert (slots_of(first), slots_of(second)) == (["slot"], [])
    assert second.media[0].grid == (1, 2, 2)
    assert subject.released == ["slot"]
    subject.check_idle()


async def test_keys_and_ids_of_attempts_are_not_used_twice() -> None:
    """Else what a worker says of an attempt that has ended could end the next one there."""
    subject = cluster(p="prefill", d="decode")
    for _ in range(3):
        await subject.answer(ask())
    assert len({one.kv_transfer.key for one in subject["p"].requests if one.kv_transfer}) == 3
    for worker in (subject["p"], subject["d"]):
        assert len({one.request_id for one in worker.requests} | {"r"}) == 4
        assert all(one.request_id.startswith("r-") for one in worker.requests)


@table(
    ("roles", "request_", "served"),
    [
        ({"a": "both"}, ask(), {"a"}),
        ({"a": "both", "d": "decode"}, ask(), {"a"}),
        ({"p": "prefill", "d": "decode"}, ask(max_tokens=1), {"p"}),
        ({"p": "prefill", "d": "decode"}, ask(num_samples=5), {"p"}),
        ({"p": "prefill"}, ask(), {"p"}),
        ({"d": "decode"}, ask(), {"d"}),
        ({"p": "prefill", "d": "decode"}, ask(), {"p", "d"}),
    ],
)
async def test_workers_by_role(roles: dict[str, str], request_: EngineRequest, served: set[str]) -> None:
    subject = cluster(**roles)
    await subject.answer(request_)
    assert {url for url, worker in subject.workers.items() if worker.requests} == served
    subject.check_idle()


def text_of(num_blocks: int) -> EngineRequest:
    """A prompt of whole blocks and five tokens more."""
    token_ids = list(range(num_blocks * DESCRIPTION.block_size + 5))
    return EngineRequest(request_id="r", token_ids=token_ids, sampling=SamplingParams(max_tokens=3))


def note_held(subject: Cluster, url: str, request: EngineRequest, num_blocks: int) -> None:
    """Have the index know that a worker holds the first blocks of *request*."""
    size, index = DESCRIPTION.block_size, subject.router.index
    root = root_key(DESCRIPTION.fingerprint, b"")
    keys = block_keys(root, request.token_ids[: num_blocks * size], (), size)
    parents = [root, *keys]
    index.begin(url, Partition(DESCRIPTION.fingerprint, size), resumes_at_states=False)
    stored = [BlockStored(key, parents[n], [], is_first=not n) for n, key in enumerate(keys)]
    index.take(url, KvEvents(0, stored, snapshot=True))


@table(
    ("num_held", "min_tokens", "served"),
    [
        # Of 4 blocks and 5 tokens, 5 are left, or a block more.
        (4, 0, {"p", "d"}),
        (4, 5, {"p", "d"}),
        (4, 6, {"d"}),
        (3, 6, {"p", "d"}),
        (0, 1000, {"d"}),
    ],
)
async def test_decode_worker_that_holds_nearly_all_serves_alone(
    num_held: int, min_tokens: int, served: set[str]
) -> None:  # E6
    subject, request = (
        cluster(DispatchLimits(disaggregation_min_tokens=min_tokens), p="prefill", d="decode"),
        text_of(4),
    )
    note_held(subject, "d", request, num_held)
    await subject.answer(request)
    assert {url for url, worker in subject.workers.items() if worker.requests} == served
    assert all(
        worker.requests[0].kv_transfer is None for worker in subject.workers.values() if served == {"d"} == {worker.url}
    )
    subject.check_idle()


async def test_of_the_decode_workers_only_one_that_holds_nearly_all_serves_alone() -> None:
    subject, request = (
        cluster(DispatchLimits(disaggregation_min_tokens=20), p="prefill", d="decode", e="decode"),
        text_of(4),
    )
    note_held(subject, "e", request, 4)
    for _ in range(4):
        await subject.answer(request)
    assert [len(worker.requests) for worker in subject.workers.values()] == [0, 0, 4]


async def test_images_to_encode_count_for_a_decode_worker_that_would_serve_alone() -> None:
    subject = cluster(DispatchLimits(disaggregation_min_tokens=2), p="prefill", d="decode")
    run = MediaRun(0, 1, bytes(32), 0)
    prompt = Prompt([1], runs=(run,), sampling=SamplingParams(max_tokens=3))
    async with subject.dispatcher.place("m", prompt) as placement:
        assert placement.pair is not None
    preview = await subject.dispatcher.preview("m", Prompt([1], sampling=SamplingParams(max_tokens=3)))
    assert preview.choice.worker == "d"


@pytest.mark.parametrize("change", [{"block_size": 32}, {"kv_cache_dtype": "float8_e4m3fn"}, {"dtype": "bfloat16"}])
async def test_workers_that_could_not_exchange_state_are_not_paired(change: dict[str, Any]) -> None:
    subject = cluster(p="prefill", d="decode", e="decode")
    subject["d"].become(description=msgspec.structs.replace(subject["d"].state.description, **change))
    for _ in range(4):
        await subject.answer(ask())
    assert not subject["d"].requests
    assert len(subject["e"].requests) == 4


async def test_decode_work_is_spread_over_decode_workers() -> None:
    subject = cluster(p="prefill", q="prefill", d="decode", e="decode")
    for _ in range(4):
        await subject.answer(ask())
    assert [len(worker.requests) for worker in subject.workers.values()] == [2, 2, 2, 2]
    subject.check_idle()


@pytest.mark.parametrize("error", [WorkerFailed("died"), WorkerUnavailable("gone")])
@pytest.mark.parametrize("failing", ["p", "d"])
async def test_leg_that_fails_is_named_and_ends_the_other(failing: str, error: SaccadeError) -> None:
    subject = cluster(p="prefill", d="decode")
    subject[failing].failures.append(error)
    if failing == "p":
        subject["d"].gate.clear()
    with pytest.raises(type(error), match=error.message):
        await subject.answer(ask())
    assert subject.failed == [failing]
    assert subject.released == ["slot"]
    subject.check_idle()


CUT = PeerFailed("the other one is gone")
DIED = WorkerFailed("died")


async def test_transfer_that_fails_is_charged_to_its_guilty_end() -> None:
    """The breaker, and the next attempt without that worker, follow from the charge."""
    cases: list[tuple[SaccadeError | None, SaccadeError | None, str]] = [
        (None, CUT, "p"),  # the port of the prefill worker cannot be reached
        (CUT, None, "d"),  # the decode worker never came
        (DIED, CUT, "p"),
        (CUT, DIED, "d"),
        (DIED, DIED, "p"),
    ]
    for case in cases:
        *errors, charged = case
        subject = cluster(p="prefill", q="prefill", d="decode", e="decode")
        subject.excluded = frozenset("qe")
        for _ in range(3):
            for url, error in zip("pd", errors, strict=True):
                if error is None:
                    subject[url].gate.clear()
                else:
                    subject[url].failures.append(error)
            with pytest.raises(WorkerFailed) as raised:
                await subject.answer(ask())
            assert raised.value.code == "worker_failed", case
        assert subject.failed == [charged] * 3, case
        states = {url: subject.router.breakers.report(url, time.monotonic()).state for url in "pd"}
        assert {url for url, state in states.items() if state == "open"} == {charged}, case
        subject.check_idle()


@pytest.mark.parametrize(
    ("excluded", "served"), [("p", {"q", "d"}), ("d", {"p", "e"}), ("pq", {"d"}), ("de", {"p"}), ("pqd", {"e"})]
)
async def test_failed_workers_get_no_leg_of_the_next_attempt(excluded: str, served: set[str]) -> None:
    subject = cluster(p="prefill", q="prefill", d="decode", e="decode")
    subject.excluded = frozenset(excluded)
    assert await subject.answer(ask()) == TOKENS
    assert {url for url, worker in subject.workers.items() if worker.requests} == served
    subject.check_idle()


async def test_prefill_leg_may_ask_for_pixels() -> None:
    subject = cluster(p="prefill", d="decode")
    subject["p"].asks = True
    assert await subject.answer(ask()) == TOKENS
    assert subject.supplied == [[0]]


async def test_bad_request_ends_both_legs() -> None:
    subject = cluster(p="prefill", d="decode")
    subject["p"].failures.append(InvalidValue("bad", "messages"))
    subject["d"].gate.clear()
    with pytest.raises(InvalidValue):
        await subject.answer(ask())
    assert len(subject["p"].requests) == 1
    subject.check_idle()


async def test_decode_leg_may_fail_behind_its_first_token() -> None:
    subject = cluster(p="prefill", d="decode")
    subject["d"].fails_after = 2
    with pytest.raises(WorkerFailed):
        await subject.answer(ask())
    assert [len(worker.requests) for worker in subject.workers.values()] == [1, 1]
    subject.check_idle()


@pytest.mark.parametrize("waiting", [(), ("p",), ("d",), ("p", "d")])
async def test_client_that_leaves_ends_both_legs(waiting: Sequence[str]) -> None:
    """Before anything ran, while the prompt is computed, while state moves, and while tokens come."""
    subject = cluster(p="prefill", d="decode")
    for url in waiting:
        subject[url].gate.clear()
    for num_turns in (0, 1, 2, 5, 20):
        answering = asyncio.create_task(subject.answer(ask()))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        subject.check_idle()
    # The first attempt was cancelled before its request was given to stream().
    assert subject.released == ["slot"] * 4


async def test_samples_are_aborted_at_the_decode_worker() -> None:
    subject = cluster(p="prefill", d="decode")
    async with subject.dispatcher.place(
        "m", Prompt([1], sampling=SamplingParams(max_tokens=3), num_samples=2)
    ) as placement:
        assert placement.pair is not None
        sink = QueueSink(no_pixels)
        legs = placement.pair.generate(ask(num_samples=2), sink, no_chat)
        await sink.arrived.get()
        legs.abort_sample(1)
        await legs.close()
        assert placement.pair.url == "p + d"
    [leg] = subject["d"].requests
    assert (subject["p"].aborted, subject["d"].aborted) == ([], [(leg.request_id, 1)])
    subject.check_idle()


async def test_prefill_worker_is_free_once_the_prompt_is_computed() -> None:
    subject = cluster(p="prefill", d="decode")
    seen: list[int] = []

    def note() -> None:
        seen.append(subject.router.work_of("p").num_requests)

    await subject.answer(ask(), note)
    assert seen[-1] == 0
