"""The worker's end of TokenSpeed's wire over a real connection, with an engine that a test plays."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from collector import collecting
from fronts import Front
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub
from tables import table
from tokenspeed_requests import AFTER, BEFORE, Model, in_file
from waiting import until

from saccade.connectors.smg.model import unpack_bundle
from saccade.errors import StartupError
from saccade.identity.blocks import root_key
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvents, MediaPlace
from saccade.protocol.output import Failure, FinishReason, SampleTimes, StepFrame, TokenDelta, TokenLogprob
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand, ResetCaches
from saccade.tracing.tracer import TraceSettings
from saccade.transport import shared_memory
from saccade.transport.gateway_streams import GatewayStream, Refused
from saccade.transport.shared_memory import FOLDER
from saccade.worker.tokenspeed.border import UNFORESEEN
from saccade.worker.tokenspeed.images import SALT, pad_value
from saccade.worker.tokenspeed.port import TokenSpeedPort
from saccade.worker.tokenspeed.server import TokenSpeedServer
from saccade.worker.tokenspeed.service import NO_FOLDER

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
STALL = "stall"


class Engine(Front):
    """Answers every request with the deltas of *script*, and an abort as engines do; *ready* is whether it runs."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description
        self.ready = True
        self.script: list[dict[str, Any] | str] = [
            {"token_ids": [40, 41], "num_cached_tokens": 2},
            {"token_ids": [42], "finish_reason": LENGTH},
        ]
        self.connection: GatewayStream | None = None
        self.load = Load()

    def described(self) -> Description:
        if not self.ready:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")
        return self.description

    def open(self, frames: Any = None) -> GatewayStream:
        self.described()
        self.connection = super().open(frames)
        self.connection.send(msgspec.msgpack.encode(StepFrame([], load=self.load)))
        return self.connection

    def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
        match command:
            case EngineRequest():
                for step in self.script:
                    if isinstance(step, dict):
                        self.say(connection, command.request_id, **step)
            case Abort(request_id=request_id, index=index):
                self.say(connection, request_id, token_ids=[], finish_reason=FinishReason.ABORT, index=index or 0)

    def say(self, connection: GatewayStream, request_id: str, **delta: Any) -> None:
        connection.send(msgspec.msgpack.encode(StepFrame([TokenDelta(request_id, **delta)])))

    @property
    def requests(self) -> list[EngineRequest]:
        return [command for command in self.commands if isinstance(command, EngineRequest)]

    @property
    def aborts(self) -> list[tuple[str, int | None]]:
        return [(command.request_id, command.index) for command in self.commands if isinstance(command, Abort)]


@pytest.fixture
def model(network_folder: Callable[[str], Path]) -> Model:
    return Model(network_folder("qwen3_vl"), "qwen3_vl")


@pytest.fixture
def engine(model: Model) -> Engine:
    return Engine(model.description)


@asynccontextmanager
async def calling(engine: Engine, **port: Any) -> AsyncIterator[Any]:
    server = TokenSpeedServer(engine, engine.described, TokenSpeedPort("127.0.0.1:0", **port))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address.removeprefix("grpc://")) as channel:
            yield TokenSpeedSchedulerStub(channel)
    finally:
        await server.stop()


async def answers(stub: Any, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(message)]


async def refusal(stub: Any, message: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(stub, message)
    return caught.value.code(), str(caught.value.details())


async def test_whole_answer(model: Model, engine: Engine) -> None:
    async with calling(engine) as stub:
        (response,) = await answers(stub, model.message())
    complete = response.complete
    assert (response.request_id, list(complete.output_ids), complete.finish_reason) == ("r1", [40, 41, 42], "length")
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 3, 2)
    assert complete.WhichOneof("matched_stop") is None
    (request,) = engine.requests
    assert (request.token_ids, request.salt, request.media) == ([*BEFORE, *AFTER], SALT, ())


async def test_a_call_becomes_a_trace_that_continues_its_gateway_s(
    model: Model, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    engine.script = [
        {"token_ids": [40]},
        {"token_ids": [41], "finish_reason": LENGTH, "times": SampleTimes(1e-5, 2e-5, 3e-5)},
    ]
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with collecting() as collector:
        async with calling(engine, tracing=TraceSettings(collector.endpoint, 0)) as stub:
            await answers(stub, model.message(request_id="r0"))
            metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
            assert [response async for response in stub.Generate(model.message(), metadata=metadata)]
        spans = {span.name: span for span in collector.spans}
    assert len(collector.spans) == len(spans) == 4
    call = spans.pop("Generate")
    assert (call.trace_id, call.parent, call.has_failed) == (trace_id, "b7ad6b7169203331", False)
    assert call.attributes == {"saccade.request_id": "r1", "gen_ai.usage.input_tokens": 3}
    assert spans.keys() == {"engine.queue", "engine.prefill", "engine.decode"}
    assert {span.parent for span in spans.values()} == {call.id}


async def test_streamed_answer(model: Model, engine: Engine) -> None:
    async with calling(engine) as stub:
        first, second, last = await answers(stub, model.message(stream=True))
    assert [list(chunk.chunk.token_ids) for chunk in (first, second)] == [[40, 41], [42]]
    assert [chunk.chunk.completion_tokens for chunk in (first, second)] == [2, 3]
    assert (list(last.complete.output_ids), last.complete.finish_reason) == ([40, 41, 42], "length")


@pytest.mark.parametrize(("keeps", "ids"), [(False, [40]), (True, [40, 9])])
async def test_stop_id(model: Model, engine: Engine, keeps: bool, ids: list[int]) -> None:
    engine.script = [{"token_ids": [40]}, {"token_ids": [9], "finish_reason": STOP}]
    sampling = {"stop_token_ids": [9], "no_stop_trim": keeps}
    async with calling(engine) as stub:
        whole = (await answers(stub, model.message(sampling=sampling)))[-1].complete
        streamed = await answers(stub, model.message(sampling=sampling, stream=True))
    for complete in (whole, streamed[-1].complete):
        assert (list(complete.output_ids), complete.finish_reason) == (ids, "stop")
        assert (complete.matched_token_id, complete.completion_tokens) == (9, 2)
    assert [token_id for chunk in streamed for token_id in chunk.chunk.token_ids] == ids


def ids_of(model: Model, text: str) -> list[int]:
    return model.wire.tokenizer.encode_text(text)


async def test_stop_string_ends_the_sample(model: Model, engine: Engine) -> None:
    before, behind = ids_of(model, "one two STOP"), ids_of(model, " three")
    engine.script = [{"token_ids": before + behind}, STALL]
    sampling = {"stop": ["never", "STOP", "TOP"], "skip_special_tokens": True}
    async with calling(engine) as stub:
        (response,) = await answers(stub, model.message(sampling=sampling))
        await until(lambda: engine.aborts)
    complete = response.complete
    assert (list(complete.output_ids), complete.finish_reason) == (before, "stop")
    assert complete.matched_stop_str == "STOP"
    assert engine.aborts == [(engine.requests[0].request_id, None)]


async def test_stop_string_of_one_sample_leaves_the_others(model: Model, engine: Engine) -> None:
    end, text = ids_of(model, "END"), ids_of(model, "go")
    engine.script = [
        {"token_ids": end, "index": 1},
        {"token_ids": [], "finish_reason": FinishReason.ABORT, "index": 1},
        {"token_ids": text, "index": 0, "finish_reason": LENGTH},
    ]
    async with calling(engine) as stub:
        responses = await answers(stub, model.message(sampling={"stop": ["END"], "n": 2}))
    assert [(r.complete.index, r.complete.finish_reason) for r in responses] == [(1, "stop"), (0, "length")]
    assert engine.requests[0].num_samples == 2
    assert engine.aborts[0] == (engine.requests[0].request_id, 1)


async def test_samples(model: Model, engine: Engine) -> None:
    engine.script = [{"token_ids": [40 + index], "index": index, "finish_reason": LENGTH} for index in (2, 0, 1)]
    async with calling(engine) as stub:
        responses = await answers(stub, model.message(sampling={"n": 3}))
    assert [(r.complete.index, list(r.complete.output_ids)) for r in responses] == [(2, [42]), (0, [40]), (1, [41])]


async def test_log_probabilities(model: Model, engine: Engine) -> None:
    entries = [TokenLogprob(-0.5, 1, [40, 9], [-0.5, -1.0]), TokenLogprob(-2.0, 3, [1, 2], [-0.25, -0.75])]
    engine.script = [{"token_ids": [40, 41], "finish_reason": LENGTH, "logprobs": entries}]
    async with calling(engine) as stub:
        (whole,) = await answers(stub, model.message(return_logprob=True, top_logprobs_num=2))
        chunk, last = await answers(stub, model.message(return_logprob=True, top_logprobs_num=2, stream=True))
    for logprobs in (whole.complete.output_logprobs, chunk.chunk.output_logprobs):
        assert (list(logprobs.token_logprobs), list(logprobs.token_ids)) == ([-0.5, -2.0], [40, 41])
        assert [list(top.token_ids) for top in logprobs.top_logprobs] == [[40, 9], [1, 2]]
        assert list(logprobs.top_logprobs[1].values) == [-0.25, -0.75]
    assert not last.complete.HasField("output_logprobs")
    assert engine.requests[0].sampling.num_logprobs == 2


async def test_sampling_parameters(model: Model, engine: Engine) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "frequency_penalty": 1.5,
        "presence_penalty": -1.0,
        "repetition_penalty": 2.0,
        "max_new_tokens": 77,
        "min_new_tokens": 3,
        "stop_token_ids": [9, 8],
        "logit_bias": {"12": -100.0},
        "sampling_seed": (1 << 64) - 1,
        "ignore_eos": True,
    }
    async with calling(engine) as stub:
        await answers(stub, model.message(sampling=given))
    sampling = engine.requests[0].sampling
    named = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.frequency_penalty)
    assert named == (0.5, 0.25, 0, 0.125, 1.5)
    assert (sampling.presence_penalty, sampling.repetition_penalty, sampling.max_tokens) == (-1.0, 2.0, 77)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.logit_bias) == (3, (9, 8), {12: -100.0})
    assert (sampling.seed, sampling.num_logprobs) == ((1 << 64) - 1, None)


async def test_defaults_are_the_models(model: Model, engine: Engine) -> None:
    message = model.message()
    message.ClearField("sampling_params")
    async with calling(engine) as stub:
        await answers(stub, message)
    sampling, defaults = engine.requests[0].sampling, model.wire.defaults
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (
        defaults.temperature,
        defaults.top_p,
        defaults.top_k,
    )
    assert sampling.stop_token_ids == tuple(defaults.eos_token_ids) != ()
    assert sampling.max_tokens == 4096 - 3


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"regex": "a"}, "sampling_params.regex"),
    ({}, {"json_schema": "{}"}, "sampling_params.json_schema"),
    ({}, {"ebnf_grammar": "a"}, "sampling_params.ebnf_grammar"),
    ({}, {"structural_tag": "a"}, "sampling_params.structural_tag"),
    ({}, {"custom_params": {"a": 1}}, "sampling_params.custom_params"),
    ({}, {"stop": ["a", ""]}, "sampling_params.stop"),
    ({}, {"logit_bias": {"a": 1.0}}, "sampling_params.logit_bias"),
    ({"logprob_start_len": 0}, {}, "logprob_start_len"),
    ({"token_ids_logprob": [1]}, {}, "token_ids_logprob"),
    ({"top_logprobs_num": 1}, {}, "top_logprobs_num"),
    ({"encode_bootstrap_info": {}}, {}, "encode_bootstrap_info"),
    ({"kv_bootstrap_info": {"bootstrap_room": 1}}, {}, "kv_bootstrap_info"),
    ({"data_parallel_rank": 1}, {}, "data_parallel_rank"),
    ({"tokenized": {}}, {}, "tokenized.input_ids"),
    ({"tokenized": {"input_ids": [5] * 4096}}, {}, "maximum context length is 4096"),
]


@table(("fields", "sampling", "named"), REFUSED)
async def test_unserved_parameters_are_refused_by_name(
    model: Model, engine: Engine, fields: dict[str, Any], sampling: dict[str, Any], named: str
) -> None:
    async with calling(engine) as stub:
        status, sentence = await refusal(stub, model.message(sampling=sampling, **fields))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert named in sentence
    assert engine.requests == []


async def test_fields_that_change_nothing_are_accepted(model: Model, engine: Engine) -> None:
    async with calling(engine) as stub:
        message = model.message(logprob_start_len=-1, data_parallel_rank=0, sampling={"n": 1})
        assert (await answers(stub, message))[0].complete.finish_reason == "length"


async def test_images(model: Model, engine: Engine) -> None:  # B9
    message = model.message(model.item(seed=1), model.item(seed=2, start=82))
    async with calling(engine) as stub:
        await answers(stub, message)
    (request,) = engine.requests
    expected = [model.prepared(seed, "uint8")[1].tobytes() for seed in (1, 2)]
    assert [item.inline for item in request.media] == expected


@pytest.mark.parametrize("is_refused", [False, True])
async def test_files_are_removed(model: Model, engine: Engine, is_refused: bool) -> None:
    item = model.item()
    item.encoder_input.CopyFrom(in_file(item.encoder_input))
    path = FOLDER / item.encoder_input.shm.name
    message = model.message(item, token_ids_logprob=[1] if is_refused else [])
    assert path.exists()
    async with calling(engine) as stub:
        if is_refused:
            await refusal(stub, message)
        else:
            await answers(stub, message)
    assert not path.exists()
    assert len(engine.requests) == (not is_refused)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_value", grpc.StatusCode.INVALID_ARGUMENT),
        ("context_length_exceeded", grpc.StatusCode.INVALID_ARGUMENT),
        ("queue_full", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("worker_unavailable", grpc.StatusCode.UNAVAILABLE),
        ("worker_failed", grpc.StatusCode.INTERNAL),
    ],
)
async def test_failures_of_the_engine(model: Model, engine: Engine, code: str, status: grpc.StatusCode) -> None:
    failure = Failure(code, "A sentence.", "a_field")
    engine.script = [{"token_ids": [], "finish_reason": FinishReason.ERROR, "failure": failure}]
    async with calling(engine) as stub:
        assert await refusal(stub, model.message()) == (status, "A sentence.")


async def test_closing_aborts(model: Model, engine: Engine) -> None:
    engine.script = [{"token_ids": [40]}, STALL]
    async with calling(engine) as stub:
        call = stub.Generate(model.message(stream=True))
        assert list((await call.read()).chunk.token_ids) == [40]
        call.cancel()
        await until(lambda: engine.aborts)
        engine.script = [{"token_ids": [40], "finish_reason": LENGTH}]
        assert len(await answers(stub, model.message())) == 1  # under the same id


async def test_abort(model: Model, engine: Engine) -> None:
    engine.script = [{"token_ids": [40]}, STALL]
    async with calling(engine) as stub:
        call = stub.Generate(model.message(stream=True))
        await call.read()
        assert not (await stub.Abort(pb.AbortRequest(request_id="other"))).success
        assert (await stub.Abort(pb.AbortRequest(request_id="r1"))).success
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    assert engine.aborts == [(engine.requests[0].request_id, None)]


async def test_an_id_in_use_is_refused(model: Model, engine: Engine) -> None:
    engine.script = [{"token_ids": [40]}, STALL]
    async with calling(engine) as stub:
        call = stub.Generate(model.message(stream=True))
        await call.read()
        status, sentence = await refusal(stub, model.message())
        call.cancel()
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "in use" in sentence


async def test_an_engine_that_ends_fails_its_requests(model: Model, engine: Engine) -> None:
    engine.script = [{"token_ids": [40]}, STALL]
    async with calling(engine) as stub:
        call = stub.Generate(model.message(stream=True))
        await call.read()
        assert engine.connection is not None
        engine.ready = False
        engine.connection.end(Refused(grpc.StatusCode.UNAVAILABLE, "The engine was killed."))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert (await refusal(stub, model.message()))[0] is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as unwell:
            await stub.HealthCheck(pb.HealthCheckRequest())
        assert unwell.value.code() is grpc.StatusCode.UNAVAILABLE
        engine.ready, engine.script = True, [{"token_ids": [40], "finish_reason": LENGTH}]
        assert len(await answers(stub, model.message())) == 1


async def test_registration(model: Model, engine: Engine) -> None:  # A5
    async with calling(engine) as stub:
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert (info.served_model_name, info.model_type, info.max_context_length) == ("m", "qwen3_vl", 4096)
    assert list(info.architectures) == ["Qwen3VLForConditionalGeneration"]
    assert tuple(info.eos_token_ids) == tuple(model.wire.defaults.eos_token_ids)
    assert (info.supports_vision, list(info.supported_modalities)) == (True, [common_pb2.IMAGE])
    assert (info.multimodal_encoder_dtype, info.vocab_size) == ("bfloat16", model.wire.spec.vocab_size)
    assert info.tokenizer_path.startswith(NO_FOLDER)  # so that a gateway asks for the files
    assert server.scheduler_info["shm_namespace_id"] == shared_memory.namespace()
    assert (server.server_args["block_size"], server.server_args["max_num_seqs"]) == (16, 8)
    assert server.max_total_num_tokens == 64 * 16
    bundle = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(bundle).hexdigest()]
    assert unpack_bundle(bundle) == model.description.files


async def test_load(engine: Engine) -> None:
    engine.load = Load(num_running=2, num_waiting=1, num_blocks=64, num_free_blocks=48)
    async with calling(engine) as stub:
        await stub.HealthCheck(pb.HealthCheckRequest())
        reply = await stub.GetLoads(pb.GetLoadsRequest())
        other = await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    (rank,) = reply.loads
    assert (rank.num_running_reqs, rank.num_waiting_reqs, rank.num_total_reqs) == (2, 1, 3)
    assert (rank.num_used_tokens, rank.max_total_num_tokens, rank.token_usage) == (256, 1024, 0.25)
    assert list(other.loads) == []


async def test_flush(engine: Engine) -> None:
    async with calling(engine) as stub:
        assert (await stub.FlushCache(common_pb2.FlushCacheRequest())).success
    assert engine.commands == [ResetCaches(prefix=True, media=True)]


ROOT = root_key(bytes(32), SALT)
IMAGE = bytes(24) + b"abcdefgh"


def key(number: int) -> bytes:
    return bytes(8) + number.to_bytes(8, "big")


def stored(number: int, parent: bytes, *media: MediaPlace) -> BlockStored:
    return BlockStored(key(number), parent, [number % 1000] * 16, list(media))


async def batches(engine: Engine, messages: list[KvEvents], count: int) -> list[common_pb2.KvEventBatch]:
    """The first *count* batches of a subscription while the engine tells *messages*."""
    async with calling(engine, kv_events=True) as stub:
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await call.initial_metadata()  # at once, before there is any event
        await until(lambda: engine.watchers)
        for message in messages:
            engine.watchers[0].send(msgspec.msgpack.encode(message))
        opening, *read = [await call.read() for _ in range(1 + count)]
        call.cancel()
        await until(lambda: engine.left)
    assert engine.watched == [(True, False)]
    assert (opening.sequence_number, opening.dp_rank) == (0, 0)
    assert [event.WhichOneof("data") for event in opening.events] == ["cleared"]
    return read


async def test_cache_events(engine: Engine) -> None:  # E8
    place = MediaPlace(IMAGE, 4, 8, 0)
    messages = [
        KvEvents(7, [stored(1, ROOT), stored(2, key(1), place)], snapshot=True),
        KvEvents(8, [stored(3, key(2)), stored(4, key(1)), BlockRemoved(key(2)), BlockRemoved(key(3))]),
        KvEvents(9, [BlockRemoved(key(99))]),
        KvEvents(10, [stored((1 << 64) - 1, ROOT)]),
    ]
    first, second, third = await batches(engine, messages, 3)
    assert [batch.sequence_number for batch in (first, second, third)] == [1, 2, 3]
    assert [batch.dp_rank for batch in (first, second, third)] == [0, 0, 0]
    assert [event.WhichOneof("data") for event in first.events] == ["stored"]
    chain = first.events[0].stored
    assert not chain.HasField("parent_block_hash")
    assert [block.block_hash for block in chain.blocks] == [1, 2]
    assert {block.block_size for block in chain.blocks} == {16}
    pads = [pad_value(IMAGE)] * 8
    assert [list(block.token_ids) for block in chain.blocks] == [[1] * 16, [2] * 4 + pads + [2] * 4]
    kinds = [event.WhichOneof("data") for event in second.events]
    assert kinds == ["stored", "stored", "removed"]
    assert [event.stored.parent_block_hash for event in second.events[:2]] == [2, 1]
    assert list(second.events[2].removed.block_hashes) == [2, 3]
    assert third.events[0].stored.blocks[0].block_hash == -1
    ids = [event.event_id for batch in (first, second, third) for event in batch.events]
    assert ids == list(range(2, len(ids) + 2))


async def test_blocks_of_other_wires_are_not_reported(engine: Engine) -> None:  # E5
    other = root_key(bytes(32), b"")
    events = [stored(1, other), stored(2, key(1)), stored(3, ROOT), BlockRemoved(key(1))]
    (batch,) = await batches(engine, [KvEvents(1, events, snapshot=True)], 1)
    assert [event.WhichOneof("data") for event in batch.events] == ["stored"]
    assert [block.block_hash for block in batch.events[0].stored.blocks] == [3]


async def status_of_subscription(engine: Engine, start: int = 0, **port: Any) -> grpc.StatusCode:
    async with calling(engine, **port) as stub:
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
    return caught.value.code()


async def test_a_subscriber_with_a_past_begins_again(engine: Engine) -> None:
    assert await status_of_subscription(engine, 5, kv_events=True) is grpc.StatusCode.OUT_OF_RANGE


async def test_events_are_sent_only_if_subscribed(engine: Engine) -> None:
    assert await status_of_subscription(engine) is grpc.StatusCode.UNIMPLEMENTED


@table("kind", [{"resumes_at_states": True}, {"window": 512}])
async def test_no_events_of_models_that_resume_at_states(engine: Engine, kind: dict[str, Any]) -> None:
    engine.description = msgspec.structs.replace(engine.description, **kind)
    assert await status_of_subscription(engine, kv_events=True) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_subscription_ends_with_the_engine(engine: Engine) -> None:
    async with calling(engine, kv_events=True) as stub:
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await until(lambda: engine.watchers)
        engine.watchers[0].end(Refused(grpc.StatusCode.UNAVAILABLE, "The engine was killed."))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_requests_at_once(model: Model, engine: Engine) -> None:
    async with calling(engine) as stub:
        messages = [model.message(request_id=f"r{number}") for number in range(20)]
        found = await asyncio.gather(*(answers(stub, message) for message in messages))
    assert [responses[0].request_id for responses in found] == [f"r{number}" for number in range(20)]
    assert engine.num_connections == 1


@pytest.mark.parametrize("bind", ["0.0.0.0:5", "192.168.7.7:5", "[::]:5", "somewhere:5"])
def test_other_machines_need_consent(bind: str) -> None:
    with pytest.raises(StartupError, match="--serve-tokenspeed-to-anyone"):
        TokenSpeedPort(bind).check()
    port = TokenSpeedPort(bind, is_open=True)
    port.check()
    assert "without credentials" in port.remark("grpc://x")


@pytest.mark.parametrize(
    "bind", ["127.0.0.1", "127.0.0.1:", ":5", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:" + "1" * 5000]
)
def test_malformed_address(bind: str) -> None:
    with pytest.raises(StartupError, match="HOST:PORT"):
        TokenSpeedPort(bind).check()


async def test_address_in_use(engine: Engine) -> None:
    server = TokenSpeedServer(engine, engine.described, TokenSpeedPort("127.0.0.1:0"))
    await server.start()
    try:
        second = TokenSpeedServer(engine, engine.described, TokenSpeedPort(f"127.0.0.1:{server.port}"))
        with pytest.raises(StartupError, match="in use"):
            await second.start()
    finally:
        await server.stop()


async def test_too_many_samples_are_refused_before_anything_is_kept_for_them(model: Model, engine: Engine) -> None:
    async with calling(engine) as stub:
        status, sentence = await refusal(stub, model.message(sampling={"n": (1 << 32) - 1}))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling_params.n" in sentence
    assert not engine.requests


@pytest.mark.parametrize("call", ["Generate", "GetLoads"])
async def test_a_fault_of_ours_is_not_shown_to_the_caller(
    engine: Engine, model: Model, caplog: pytest.LogCaptureFixture, call: str
) -> None:  # contract 7
    def broken() -> Description:
        raise KeyError("inner words")

    server = TokenSpeedServer(engine, broken, TokenSpeedPort("127.0.0.1:0"))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address.removeprefix("grpc://")) as channel:
            stub = TokenSpeedSchedulerStub(channel)
            if call == "Generate":
                status, sentence = await refusal(stub, model.message())
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetLoads(pb.GetLoadsRequest())
                status, sentence = caught.value.code(), str(caught.value.details())
    finally:
        await server.stop()
    assert (status, sentence) == (grpc.StatusCode.INTERNAL, UNFORESEEN)
    assert "inner words" in caplog.text
