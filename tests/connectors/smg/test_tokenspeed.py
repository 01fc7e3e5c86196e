"""The client of the TokenSpeed wire against a worker that says whatever a test wants."""

import asyncio
import gc
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_servicer.mm_shm import tensor_payload_bytes
from streams import QueueSink, generate, no_pixels
from tables import table
from tokenspeed_worker import (
    FILES,
    PIXELS,
    PLACEHOLDER,
    Slots,
    TokenSpeedWorker,
    ask,
    chunk,
    complete,
    context,
    image,
    listening,
    registered,
    zipped,
)
from waiting import until

from saccade.connectors.smg import client as smg_client
from saccade.connectors.smg import model as smg_model
from saccade.connectors.smg import shared_memory_links
from saccade.connectors.smg.tokenspeed import ADDRESSES, TokenSpeedClient
from saccade.errors import (
    DeadlineExceeded,
    ImageTooLarge,
    InternalError,
    QueueFull,
    RequestError,
    SaccadeError,
    StartupError,
    UnsupportedParameter,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles
from saccade.protocol.media import Span
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest
from saccade.transport import shared_memory

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def answer(client: TokenSpeedClient, request: EngineRequest) -> list[tuple[list[int], FinishReason | None, int]]:
    deltas = [delta async for delta in generate(client, request)]
    return [(delta.token_ids, delta.finish_reason, delta.num_cached_tokens) for delta in deltas]


async def outcome(worker: TokenSpeedWorker, slots: Slots, request: EngineRequest) -> Any:
    """The answer to *request*, or the error it ends with."""
    async with listening(worker) as url, registered(url, slots) as client:
        try:
            return await answer(client, request)
        except SaccadeError as error:
            return type(error)


async def test_stream_closed_at_once_gives_its_slots_back(slots: Slots) -> None:
    slot = slots.filled(PIXELS)
    async with listening(TokenSpeedWorker()) as url, registered(url, slots) as client:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await client.generate(ask(image(slot=slot)), QueueSink(no_pixels)).close()
            gc.collect()
    assert slots.released == [slot.name]


async def test_description(slots: Slots) -> None:  # A5
    async with listening(TokenSpeedWorker()) as url, registered(url, slots) as client:
        described = client.description
        await until(lambda: client.load)
    assert described is not None
    assert (described.model, described.max_model_len, described.max_num_seqs) == ("m", 4096, 8)
    assert (described.block_size, described.num_blocks) == (16, 64)
    assert (described.pixel_dtype, described.shm_namespace) == ("bfloat16", shared_memory.namespace())
    assert described.files == FILES
    assert len(described.fingerprint) == 32
    assert not client.ready


@pytest.mark.parametrize(("said", "sent"), [("", "bfloat16"), ("float32", "float32"), ("float16", "float32")])
async def test_pixel_dtype(slots: Slots, said: str, sent: str) -> None:
    worker = TokenSpeedWorker()
    worker.info |= {"multimodal_encoder_dtype": said}
    async with listening(worker) as url, registered(url, slots) as client:
        assert client.description is not None
        assert client.description.pixel_dtype == sent


async def test_load(slots: Slots) -> None:
    async with listening(TokenSpeedWorker()) as url, registered(url, slots) as client:
        await until(lambda: client.load)
        assert client.load is not None
        asked_at, answered_at = client.load_times
        assert asked_at < answered_at <= time.monotonic()
        assert (client.load.num_running, client.load.num_waiting, client.load.num_free_blocks) == (2, 1, 62)


async def test_operators_files_come_first(slots: Slots) -> None:
    given = ModelFiles(files={"config.json": b"{1}"})
    async with listening(TokenSpeedWorker()) as url, registered(url, slots, model_files={"m": given}) as client:
        assert client.description is not None
        assert client.description.files == given


async def test_files_of_a_folder_that_the_gateway_can_read(slots: Slots, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"[]")
    worker = TokenSpeedWorker()
    worker.info |= {"tokenizer_path": str(tmp_path)}
    read = read_model_files
    async with listening(worker) as url, registered(url, slots, read_files=read) as client:
        assert client.description is not None
        assert client.description.files == ModelFiles(files={"config.json": b"[]"})


async def test_a_folder_without_a_model_is_not_taken(slots: Slots, tmp_path: Path) -> None:
    worker = TokenSpeedWorker()
    worker.info |= {"tokenizer_path": str(tmp_path)}
    async with listening(worker) as url, registered(url, slots, read_files=read_model_files) as client:
        assert client.description is not None
        assert client.description.files == FILES


async def test_request(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.consume = tensor_payload_bytes
    async with listening(worker) as url, registered(url, slots) as client:
        await answer(client, ask(image(slots.filled()), temperature=0.5, top_k=3, seed=-1))
    (request,) = worker.requests
    assert request.stream
    assert list(request.tokenized.input_ids) == [5, PLACEHOLDER, PLACEHOLDER, 6]
    sampling = request.sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (0.5, 3, 10)
    assert (list(sampling.stop_token_ids), sampling.ignore_eos, sampling.no_stop_trim) == ([7], False, True)
    assert sampling.sampling_seed == (1 << 64) - 1
    (item,) = request.mm_inputs.items
    assert (item.modality, item.content_hash, item.placeholder_token_id) == (1, bytes(range(32)), PLACEHOLDER)
    assert [(place.offset, place.length) for place in item.placeholders] == [(1, 2)]
    assert (list(item.encoder_input.shape), item.encoder_input.dtype) == ([8, 6], "bfloat16")
    side = {name: (list(t.shape), t.dtype, t.inline) for name, t in item.model_specific_tensors.items()}
    eight = (8).to_bytes(8, "little")
    grid = b"".join(number.to_bytes(8, "little") for number in (1, 2, 4))
    assert side == {"patches_per_image": ([1], "int64", eight), "a_grid": ([1, 3], "int64", grid)}


async def test_a_trace_goes_on_in_metadata(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    async with listening(worker) as url, registered(url, slots) as client:
        await answer(client, msgspec.structs.replace(ask(), traceparent="00-1-2-01"))
    assert worker.metadata["traceparent"] == "00-1-2-01"


@pytest.mark.parametrize(("stops", "ignored"), [((), True), ((9,), True), ((7, 9), False)])
async def test_end_of_sequence_counts_when_it_is_among_the_stop_ids(
    slots: Slots, stops: tuple[int, ...], ignored: bool
) -> None:
    worker = TokenSpeedWorker()
    async with listening(worker) as url, registered(url, slots) as client:
        await answer(client, ask(stop_token_ids=stops))
    assert worker.requests[0].sampling_params.ignore_eos is ignored


async def test_tenants_have_images_of_their_own(slots: Slots) -> None:  # contract 1
    worker = TokenSpeedWorker()
    asked = ask(image(inline=PIXELS))
    async with listening(worker) as url, registered(url, slots) as client:
        for salt in (b"one", b"other", b"one"):
            fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
            await answer(client, EngineRequest(**(fields | {"salt": salt})))
    one, other, again = [request.mm_inputs.items[0].content_hash for request in worker.requests]
    assert one == again
    assert len({one, other, bytes(range(32))}) == 3
    assert len(one) == 32


async def test_parameters_that_the_wire_has(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    given = {"min_p": 0.25, "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5}
    async with listening(worker) as url, registered(url, slots) as client:
        await answer(client, ask(**given, logit_bias={5: -2.5}, min_tokens=3))
        await answer(client, ask(name="r2"))
    said, unsaid = (request.sampling_params for request in worker.requests)
    assert {name: getattr(said, name) for name in given} == given
    assert (dict(said.logit_bias), said.min_new_tokens) == ({"5": -2.5}, 3)
    neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    assert {name: getattr(unsaid, name) for name in neutral if unsaid.HasField(name)} == neutral
    assert (dict(unsaid.logit_bias), unsaid.min_new_tokens) == ({}, 0)


@pytest.mark.parametrize(
    ("param", "fields", "sampling"),
    [
        ("n", {"num_samples": 2}, {}),
        ("allowed_token_ids", {}, {"allowed_token_ids": (5,)}),
        ("prompt_logprobs", {}, {"num_prompt_logprobs": 0}),
    ],
)
async def test_parameters_that_the_wire_lacks(
    slots: Slots, param: str, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    worker = TokenSpeedWorker()
    ref = slots.filled()
    async with listening(worker) as url, registered(url, slots) as client:
        with pytest.raises(UnsupportedParameter) as caught:
            await answer(client, msgspec.structs.replace(ask(image(ref), **sampling), **fields))
    assert caught.value.param == param
    assert (worker.requests, slots.released) == ([], [ref.name])


def ranked(*values: float) -> pb.OutputLogProbs:
    tops = [pb.TopLogProbs(values=[-0.5, value], token_ids=[1, 2]) for value in values]
    return pb.OutputLogProbs(token_logprobs=values, token_ids=[2] * len(values), top_logprobs=tops)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([chunk(1, 2, output_logprobs=ranked(-1, -2)), complete(1, 2)], [[-1, -2], []]),
        ([chunk(2, output_logprobs=ranked(-1)), complete(2, 3, output_logprobs=ranked(-2))], [[-1], [-2]]),
        ([chunk(2, output_logprobs=ranked(-1)), complete(2, 3, output_logprobs=ranked(-1, -2))], [[-1], [-2]]),
        ([chunk(2, 7, 9, output_logprobs=ranked(-1, -2, -3)), complete(2)], [[-1, -2]]),
        # A stop id that the worker trims is told of without one.
        ([chunk(2, output_logprobs=ranked(-1)), complete(2, matched_token_id=7)], [[-1], []]),
    ],
)
async def test_log_probabilities(slots: Slots, script: list[Any], expected: list[list[float]]) -> None:
    worker = TokenSpeedWorker()
    worker.script = script
    async with listening(worker) as url, registered(url, slots) as client:
        deltas = [delta async for delta in generate(client, ask(num_logprobs=2))]
    assert [[entry.logprob for entry in delta.logprobs] for delta in deltas] == expected
    (request,) = worker.requests
    assert (request.return_logprob, request.top_logprobs_num) == (True, 2)
    first = deltas[0].logprobs[0]
    assert (first.top_ids, first.top_logprobs) == ([1, 2], [-0.5, -1])


async def test_worker_that_was_started_without_log_probabilities(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    assert await outcome(worker, slots, ask(num_logprobs=0)) is UnsupportedParameter
    assert not worker.requests[0].top_logprobs_num


CACHED = chunk(1, 2, cached_tokens=3)


@table(
    ("script", "expected"),
    [
        ([CACHED, chunk(3), complete(3, reason="length")], [([1, 2], None, 3), ([3], None, 0), ([], LENGTH, 0)]),
        ([CACHED, complete(1, 2, 3, reason="stop")], [([1, 2], None, 3), ([3], STOP, 0)]),
        ([complete(1, 2, cached_tokens=4)], [([1, 2], STOP, 4)]),
        ([chunk(), chunk(1, cached_tokens=2), complete(1)], [([1], None, 2), ([], STOP, 0)]),
        ([chunk(1), complete(1, reason="tool_calls")], [([1], None, 0), ([], STOP, 0)]),
        # A stop id is the last of the ids, whether the worker keeps it, trims it, or its own rule ended the answer.
        ([chunk(1), chunk(7), complete(7, matched_token_id=7)], [([1], None, 0), ([7], STOP, 0)]),
        ([chunk(1, 7), complete(1, 7, matched_token_id=7)], [([1, 7], STOP, 0)]),
        ([chunk(1), complete(1, matched_token_id=7)], [([1], None, 0), ([7], STOP, 0)]),
        ([chunk(), complete(matched_token_id=7)], [([7], STOP, 0)]),
        ([chunk(1, 8), complete(8, matched_token_id=8)], [([1, 8], None, 0), ([], STOP, 0)]),
        # A worker that goes on after a stop id.
        ([chunk(1, 7, 2), chunk(3), 20.0], [([1, 7], STOP, 0)]),
        ([chunk(1, 7)], [([1, 7], STOP, 0)]),
    ],
)
async def test_answers(slots: Slots, script: list[Any], expected: list[Any]) -> None:
    worker = TokenSpeedWorker()
    worker.script = script
    assert await outcome(worker, slots, ask()) == expected


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([grpc.StatusCode.INVALID_ARGUMENT], RequestError),
        ([grpc.StatusCode.FAILED_PRECONDITION], RequestError),
        ([grpc.StatusCode.RESOURCE_EXHAUSTED], QueueFull),
        ([grpc.StatusCode.DEADLINE_EXCEEDED], DeadlineExceeded),
        ([grpc.StatusCode.UNAVAILABLE], WorkerUnavailable),
        ([chunk(1), grpc.StatusCode.UNAVAILABLE], WorkerFailed),
        ([grpc.StatusCode.INTERNAL], WorkerFailed),
        ([grpc.StatusCode.CANCELLED], WorkerFailed),
        ([], WorkerFailed),
        ([chunk(1)], WorkerFailed),
        ([pb.GenerateResponse(request_id="r1")], WorkerFailed),
        ([chunk(1, index=1)], WorkerFailed),
        ([complete(1, reason="abort")], WorkerFailed),
        ([complete(1, reason="what?")], WorkerFailed),
    ],
)
async def test_failures(slots: Slots, script: list[Any], error: type[SaccadeError]) -> None:
    worker = TokenSpeedWorker()
    worker.script = script
    ref = slots.filled()
    assert await outcome(worker, slots, ask(image(ref))) is error
    assert (slots.released, slots.discarded) == ([], [ref.name])


async def test_error_of_the_engine_is_not_shown(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.script = [grpc.StatusCode.INVALID_ARGUMENT]
    async with listening(worker) as url, registered(url, slots) as client:
        with pytest.raises(RequestError, match="does not accept") as caught:
            await answer(client, ask())
    assert "words" not in str(caught.value)


async def test_closing_aborts_at_once(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.consume = tensor_payload_bytes
    worker.script = [chunk(1), 60.0]
    ref = slots.filled()
    async with listening(worker) as url, registered(url, slots) as client:
        deltas = generate(client, ask(image(ref)))
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: worker.aborted == ["r1"] and worker.cancelled == 1)
    assert (slots.released, slots.discarded) == ([ref.name], [])


async def test_an_answered_request_is_not_aborted(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    async with listening(worker) as url, registered(url, slots) as client:
        for number in range(20):
            async for delta in generate(client, ask(name=f"r{number}")):
                if delta.finish_reason is not None:
                    break
        await until(lambda: worker.finished == 20)
    assert (worker.aborted, worker.cancelled) == ([], 0)


async def test_closing_fails_open_requests(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.script = [chunk(1), 60.0]
    async with listening(worker) as url:
        async with registered(url, slots) as client:
            deltas = generate(client, ask())
            await anext(deltas)
            waiting = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0)
        with pytest.raises(WorkerFailed):
            await waiting
        with pytest.raises(WorkerUnavailable):
            await answer(client, ask())


async def test_a_cancelled_request_stays_cancelled(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.script = [60.0]
    async with listening(worker) as url, registered(url, slots) as client:
        task = asyncio.create_task(answer(client, ask()))
        await until(lambda: worker.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: worker.aborted == ["r1"])


async def test_a_request_whose_end_is_cancelled_is_aborted_all_the_same(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.script = [60.0]
    async with listening(worker) as url, registered(url, slots) as client:
        stream = client.generate(ask(), QueueSink(no_pixels))
        await until(lambda: worker.requests)
        closing = asyncio.create_task(stream.close())
        await asyncio.sleep(0)
        closing.cancel()
        await until(lambda: worker.aborted == ["r1"])


async def test_dead_worker_in_mid_stream_and_its_successor(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.script = [chunk(1), 60.0]
    changes: list[bool] = []
    async with listening(worker) as url:
        client = TokenSpeedClient(url, context(slots, on_change=lambda changed: changes.append(changed.ready)))
        await client.start()
        await until(lambda: client.ready)
        deltas = generate(client, ask())
        await anext(deltas)
    with pytest.raises(WorkerFailed):
        await anext(deltas)
    await until(lambda: not client.ready)
    with pytest.raises(WorkerUnavailable):
        await answer(client, ask())
    async with listening(TokenSpeedWorker(), port=int(url.rpartition(":")[2])):
        await until(lambda: client.ready)
        assert (await answer(client, ask()))[-1][1] is LENGTH
        await client.close()
    assert changes == [True, False, True, False]


async def test_unwell_worker_is_not_ready_until_it_is_well(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smg_client, "LOADS_EVERY_SECONDS", 0.01)
    worker = TokenSpeedWorker()
    async with listening(worker) as url, registered(url, slots) as client:
        worker.healthy = False
        await until(lambda: not client.ready)
        worker.healthy = True
        await until(lambda: client.ready)


MALFORMED = ["tokenspeed://", "tokenspeed://host", "grpc://host:1", "tokenspeed://host:1/x", "tokenspeed://host:1?x=1"]


@pytest.mark.parametrize("url", [*MALFORMED, "tokenspeed://host:1?ranks=2"])
def test_address_of_one_worker(url: str) -> None:
    with pytest.raises(StartupError, match="tokenspeed://host:port"):
        TokenSpeedClient(url, context(Slots()))


@pytest.mark.parametrize("url", [*MALFORMED, "tokenspeed://host:1?ranks=0"])
def test_address_of_ranks(url: str) -> None:
    with pytest.raises(StartupError, match="tokenspeed://host:port"):
        ADDRESSES.worker_urls(url)


async def test_requests_name_their_rank(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.arguments["dp_size"] = 2
    async with listening(worker) as url:
        assert ADDRESSES.worker_urls(f"{url}?ranks=2") == (f"{url}?rank=0", f"{url}?rank=1")
        for one in (url, *ADDRESSES.worker_urls(f"{url}?ranks=2")):
            async with registered(one, slots) as client:
                await answer(client, ask())
    named = [
        request.data_parallel_rank if request.HasField("data_parallel_rank") else None for request in worker.requests
    ]
    assert named == [None, 0, 1]


@pytest.mark.parametrize("arguments", [{}, {"dp_size": 1}, {"attn_dp_size": 2}])
async def test_a_rank_that_requests_cannot_name_is_not_used(slots: Slots, arguments: dict[str, int]) -> None:
    worker = TokenSpeedWorker()
    worker.arguments |= arguments
    async with listening(worker) as url:
        client = TokenSpeedClient(f"{url}?rank=1", context(slots))
        await client.start()
        await until(lambda: client.loss)
        assert "no data-parallel rank 1" in client.loss
        assert not client.ready
        await client.close()


async def test_load_is_that_of_the_rank(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.arguments["dp_size"] = 2
    worker.loads = [{"dp_rank": rank, "num_running_reqs": 4 + rank, "max_running_requests": 30} for rank in range(2)]
    async with listening(worker) as url:
        for one, num_running, most in ((url, 9, 60), (f"{url}?rank=0", 4, 30), (f"{url}?rank=1", 5, 30)):
            async with registered(one, slots) as client:
                await until(lambda client=client: client.load)
                assert client.load is not None
                assert client.description is not None
                assert (client.load.num_running, client.description.max_num_seqs) == (num_running, most)


async def test_load_at_registration_is_not_asked_for_twice(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smg_client, "LOADS_EVERY_SECONDS", 3600.0)
    worker = TokenSpeedWorker()
    async with listening(worker) as url, registered(url, slots) as client:
        await until(lambda: client.load)
        await answer(client, ask())
    assert worker.num_asked_for_loads == 1


# --- pixels ---


async def test_a_slot_comes_back_when_it_was_read(slots: Slots) -> None:  # contract 3
    worker = TokenSpeedWorker()
    worker.consume = tensor_payload_bytes
    worker.script = [chunk(1), 60.0]
    ref = slots.filled()
    async with listening(worker) as url, registered(url, slots) as client:
        deltas = generate(client, ask(image(ref), image(ref, start=3)))
        await anext(deltas)
        assert slots.released == [ref.name] * 2
        await deltas.aclose()
    assert worker.pixels == [PIXELS] * 2
    assert slots.discarded == []
    with shared_memory.open_slot(ref):
        pass


async def test_slot_that_may_still_be_read_is_not_reused(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    read = slots.filled()
    unread = slots.filled()

    def consume(tensor: pb.TensorData) -> bytes:
        return tensor_payload_bytes(tensor) if not worker.pixels and tensor.shm.name.endswith("-0") else b""

    worker.consume = consume
    await outcome(worker, slots, ask(image(read), image(unread, start=3)))
    assert worker.pixels == [PIXELS, b""]
    assert (slots.released, slots.discarded) == ([read.name], [unread.name])


async def test_pixels_travel_inline_where_the_worker_sees_other_memory(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.shm_namespace = "elsewhere"
    ref = slots.filled()
    await outcome(worker, slots, ask(image(ref), image(inline=PIXELS[::-1], start=3)))
    tensors = [item.encoder_input for item in worker.requests[0].mm_inputs.items]
    assert [tensor.inline for tensor in tensors] == [PIXELS, PIXELS[::-1]]
    assert slots.released == [ref.name]


async def test_a_lost_slot_fails_its_request_only(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    kept, lost = slots.filled(), slots.filled()
    (shared_memory.FOLDER / lost.name).unlink()
    assert await outcome(worker, slots, ask(image(kept), image(lost, start=3))) is InternalError
    assert worker.requests == []
    assert sorted(slots.released) == sorted([kept.name, lost.name])


@pytest.mark.parametrize("fields", [{"pixel_dtype": "uint8"}, {"slot": None}])
async def test_pixels_in_a_form_that_the_worker_does_not_take(slots: Slots, fields: dict[str, Any]) -> None:
    ref = slots.filled()
    asked = ask(image(**({"slot": ref} | fields)))
    assert await outcome(TokenSpeedWorker(), slots, asked) is InternalError
    assert slots.released == [item.slot.name for item in asked.media if item.slot is not None]


async def test_more_inline_pixels_than_a_message_holds(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smg_client, "MAX_INLINE_BYTES", 100)
    asked = ask(image(inline=PIXELS), image(inline=PIXELS, start=3))
    assert await outcome(TokenSpeedWorker(), slots, asked) is ImageTooLarge


async def test_spans_of_an_interrupted_item(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    await outcome(worker, slots, ask(image(inline=PIXELS, spans=(Span(1, 1), Span(2, 1)))))
    places = worker.requests[0].mm_inputs.items[0].placeholders
    assert [(place.offset, place.length) for place in places] == [(1, 1), (2, 1)]


def _link(slots: Slots, pid: int, nanoseconds: int) -> Path:
    path = shared_memory.FOLDER / f"smg-tokenspeed-{pid}-{nanoseconds}-0"
    os.link(shared_memory.FOLDER / slots.filled().name, path)
    return path


def test_sweep_takes_links_of_the_dead_and_no_others(slots: Slots) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    dead, reborn, alive = _link(slots, child.pid, now), _link(slots, os.getpid(), 1), _link(slots, os.getpid(), now)
    stranger = shared_memory.FOLDER / f"smg-tokenspeed-{child.pid}-{now}-1"
    stranger.write_bytes(b"another program's" * 10)
    try:
        assert shared_memory_links.sweep() == 2
        assert [path.exists() for path in (dead, reborn, alive, stranger)] == [False, False, True, True]
    finally:
        alive.unlink()
        stranger.unlink()


# --- the zip of a worker whose files the gateway cannot read ---


def _with_false_size(bundle: bytes) -> bytes:
    """Say 1 byte where the directory tells the unpacked size of the first file."""
    entry = bundle.index(b"PK\x01\x02")
    return bundle[: entry + 24] + (1).to_bytes(4, "little") + bundle[entry + 28 :]


MANY = {f"{number}": b"" for number in range(100)} | FILES.files
BAD_BUNDLES = [
    (zipped({"tokenizer.json": b"{}"}), "lack config.json"),
    (b"", "not a plain zip"),
    (zipped(FILES.files)[:-1], "not a plain zip"),
    (zipped(FILES.files)[:-1] + b"\x01", "not a plain zip"),
    (zipped(MANY), "too many"),
    (zipped({"config.json": bytes(1001)}), "over 1000 bytes"),
    (zipped({"config.json": bytes(600), "tokenizer.json": bytes(600)}), "over 1000 bytes"),
    (_with_false_size(zipped({"config.json": bytes(900)})), "not a valid zip"),
    (zipped({"config.json": b"{}"}, method=14), "not a valid zip"),
    (zipped(FILES.files).replace(b"PK\x03\x04", b"PK\x07\x07"), "not a valid zip"),
    (zipped({"config.json": os.urandom(4000)}), "over 3000 bytes"),
]


@pytest.mark.parametrize(("bundle", "reason"), BAD_BUNDLES)
async def test_bad_bundles_are_refused(
    bundle: bytes, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(smg_model, "MAX_FILES_BYTES", 1000)
    monkeypatch.setattr(smg_model, "MAX_DIRECTORY_BYTES", 2000)
    if reason.startswith("over 3000"):
        monkeypatch.setattr(smg_model, "MAX_BUNDLE_BYTES", 3000)
    worker = TokenSpeedWorker()
    worker.bundle = bundle
    async with listening(worker) as url:
        client = TokenSpeedClient(url, context(Slots()))
        await client.start()
        await until(lambda: reason in caplog.text)
        await client.close()
    assert client.description is None


async def test_damaged_bundle_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    worker = TokenSpeedWorker()
    worker.digest = "0" * 64
    async with listening(worker) as url:
        client = TokenSpeedClient(url, context(Slots()))
        await client.start()
        await until(lambda: "sha256" in caplog.text)
        await client.close()


async def test_only_known_files_are_unpacked(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.bundle = zipped({**FILES.files, "../evil": b"x", "model.py": b"x", "sub/config.json": b"x"})
    async with listening(worker) as url, registered(url, slots) as client:
        assert client.description is not None
        assert client.description.files == FILES


async def test_a_worker_that_does_not_stop_is_aborted(slots: Slots) -> None:
    worker = TokenSpeedWorker()
    worker.script = [chunk(*range(20, 26)), chunk(*range(26, 32)), 60.0]
    async with listening(worker) as url, registered(url, slots) as client:
        with pytest.raises(WorkerFailed, match="more than was asked for"):
            await answer(client, ask(max_tokens=11))
        await until(lambda: worker.aborted == ["r1"])
