"""The client of SGLang's wire against SMG's own servicer, with a scripted engine in SGLang's place."""

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang_servicer import Engine, arguments, listening, registered, servicer_class
from smg_servicer import ANSWERS, STOPPED
from streams import generate
from tokenspeed_worker import FILES, PLACEHOLDER, Slots, context, image
from waiting import until

from saccade.connectors.context import Traits
from saccade.connectors.smg import client as smg_client
from saccade.connectors.smg.sglang import SglangClient
from saccade.errors import (
    ImageTooLarge,
    InternalError,
    QueueFull,
    RequestError,
    SaccadeError,
    UnsupportedParameter,
    WorkerFailed,
)
from saccade.protocol.media import Span
from saccade.protocol.needs import needs_of_request
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, Grammar, SamplingParams

VALUES = [float(number) for number in range(48)]
PIXELS = struct.pack("<48f", *VALUES)


@pytest.fixture
def servicer_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    with servicer_class(monkeypatch) as found:
        yield found


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    for name, content in FILES.files.items():
        (tmp_path / name).write_bytes(content)
    return Engine(arguments(tmp_path), [([1, 2], None), ([3, 7], STOPPED)])


def floats(**fields: Any) -> Any:
    """An image of 2 x 4 patches of six float32 and two tokens."""
    return image(**({"pixel_dtype": "float32"} | fields))


def ask(*media: Any, salt: bytes = b"", **sampling: Any) -> EngineRequest:
    return EngineRequest(
        request_id="r1",
        token_ids=[5, *[PLACEHOLDER] * 2 * max(1, len(media)), 6],
        sampling=SamplingParams(**({"max_tokens": 10, "stop_token_ids": (7,)} | sampling)),
        media=media,
        salt=salt,
    )


async def outcome(servicer: Any, slots: Slots, *requests: EngineRequest, **options: Any) -> Any:
    """The token ids of the answer to the last of *requests*, or the error it ends with."""
    async with listening(servicer) as target, registered(target, slots, **options) as client:
        for request in requests[:-1]:
            [delta async for delta in generate(client, request)]
        try:
            return [delta.token_ids async for delta in generate(client, requests[-1])]
        except SaccadeError as error:
            return error


async def test_registration(servicer_of: Any, engine: Engine, slots: Slots) -> None:  # A8
    async with listening(engine.servicer(servicer_of)) as target, registered(target, slots) as client:
        described = client.description
        await until(lambda: client.load)
        load, exactness = client.load, client.exactness
    assert described is not None
    assert load is not None
    assert described.files == FILES
    assert (described.model, described.max_model_len, described.max_num_seqs) == ("m", 4096, 8)
    assert (described.dtype, described.pixel_dtype, described.version) == ("bfloat16", "float32", "sglang 9")
    # Pages of one token are taken together.
    assert (described.block_size, described.num_blocks) == (16, 64)
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (2, 1, 62)
    assert exactness.level == "NONE"
    assert "--kv-events-config" in exactness.reason


async def test_pixels_and_answer(servicer_of: Any, engine: Engine, slots: Slots) -> None:  # A7
    slot = slots.filled(PIXELS)
    media = (floats(slot=slot), floats(inline=PIXELS[::-1], start=3, content_hash=bytes(range(32, 64))))
    async with listening(engine.servicer(servicer_of)) as target, registered(target, slots) as client:
        deltas = [delta async for delta in generate(client, ask(*media, temperature=0.5, top_k=3))]
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [
        ([1, 2], None),
        ([3, 7], FinishReason.STOP),
    ]
    assert deltas[0].num_cached_tokens == 2
    assert slots.released == [slot.name]
    (request,) = engine.requests
    assert request.input_ids.tolist() == [5, *[PLACEHOLDER] * 4, 6]
    assert (request.return_logprob, request.logprob_start_len, request.bootstrap_room) == (False, -1, None)
    sampling = request.sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (0.5, 3, 10)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.no_stop_trim) == ([7], False, True)
    # One item holds the images of a request, one after the other.
    (item,) = request.mm_inputs.mm_items
    assert (item.feature.shape, str(item.feature.dtype)) == ((16, 6), "torch.float32")
    assert item.feature.numpy().tobytes() == PIXELS + PIXELS[::-1]
    assert item.offsets == [(1, 2), (3, 4)]
    assert item.model_specific_data["a_grid"].tolist() == [[1, 2, 4], [1, 2, 4]]
    assert request.mm_inputs.im_token_id == PLACEHOLDER


async def test_patches_in_four_dimensions(servicer_of: Any, engine: Engine, slots: Slots) -> None:  # A7
    item = floats(inline=PIXELS, pixel_shape=(8, 3, 2, 1), spans=(Span(1, 1), Span(2, 1)))
    assert await outcome(engine.servicer(servicer_of), slots, ask(item)) == [[1, 2], [3, 7]]
    (held,) = engine.requests[0].mm_inputs.mm_items
    assert held.feature.shape == (8, 3, 2, 1)
    assert held.offsets == [(1, 1), (2, 2)]


@pytest.mark.parametrize(("steps", "expected"), ANSWERS)
async def test_answers(servicer_of: Any, engine: Engine, slots: Slots, steps: Any, expected: Any) -> None:
    engine.steps = steps
    assert await outcome(engine.servicer(servicer_of), slots, ask()) == expected


@pytest.mark.parametrize("num_logprobs", [0, 2])
async def test_log_probabilities(servicer_of: Any, engine: Engine, slots: Slots, num_logprobs: int) -> None:
    async with listening(engine.servicer(servicer_of)) as target, registered(target, slots) as client:
        deltas = [delta async for delta in generate(client, ask(num_logprobs=num_logprobs))]
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.logprob for entry in logprobs] == [-1.0, -2.0, -3.0, -7.0]
    assert [entry.top_ids for entry in logprobs] == [[9] * num_logprobs] * 4
    assert engine.requests[0].logprob_start_len == -1


@pytest.mark.parametrize(
    ("status", "error"), [(400, RequestError), (429, QueueFull), (503, SaccadeError), (None, WorkerFailed)]
)
async def test_abort_by_the_engine(
    servicer_of: Any, engine: Engine, slots: Slots, status: int | None, error: type[SaccadeError]
) -> None:
    engine.steps = [([1], None), ([], {"type": "abort", "message": "inner words", "status_code": status})]
    found = await outcome(engine.servicer(servicer_of), slots, ask())
    assert isinstance(found, error)
    assert "inner" not in found.message


async def test_closing_aborts_at_the_engine(servicer_of: Any, engine: Engine, slots: Slots) -> None:
    engine.wait_seconds = 0.2
    engine.steps = [([1], None)] * 1000
    async with listening(engine.servicer(servicer_of)) as target, registered(target, slots) as client:
        deltas = generate(client, ask())
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: "r1" in engine.aborted)


@pytest.mark.parametrize(
    ("param", "fields", "sampling"),
    [
        ("n", {"num_samples": 2}, {}),
        ("allowed_token_ids", {}, {"allowed_token_ids": (5,)}),
        ("prompt_logprobs", {}, {"num_prompt_logprobs": 0}),
        ("seed", {}, {"seed": 1}),
    ],
)
async def test_parameters_that_the_wire_lacks(
    servicer_of: Any, engine: Engine, slots: Slots, param: str, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    slot = slots.filled(PIXELS)
    asked = msgspec.structs.replace(ask(floats(slot=slot), **sampling), **fields)
    found = await outcome(engine.servicer(servicer_of), slots, asked)
    assert isinstance(found, UnsupportedParameter)
    assert found.param == param
    assert (engine.requests, slots.released) == ([], [slot.name])


async def test_a_structural_tag_holds_from_the_first_token(servicer_of: Any, engine: Engine, slots: Slots) -> None:
    await outcome(engine.servicer(servicer_of), slots, ask(grammar=Grammar("structural_tag", "{}")))
    (request,) = engine.requests
    assert (request.sampling_params.structural_tag, request.require_reasoning) == ("{}", False)


async def test_a_seed_has_no_meaning_for_a_greedy_answer(servicer_of: Any, engine: Engine, slots: Slots) -> None:
    assert await outcome(engine.servicer(servicer_of), slots, ask(seed=1, temperature=0.0)) == [[1, 2], [3, 7]]


async def test_images_of_models_whose_positions_follow_from_them(
    servicer_of: Any, engine: Engine, slots: Slots
) -> None:  # A8
    traits = {"traits": lambda _: Traits("image_grid_thw", plain_positions=False)}
    found = await outcome(engine.servicer(servicer_of), slots, ask(floats(inline=PIXELS)), **traits)
    assert isinstance(found, UnsupportedParameter)
    assert "positions" in found.message
    assert await outcome(engine.servicer(servicer_of), slots, ask(), **traits) == [[1, 2], [3, 7]]


async def test_one_tenant(servicer_of: Any, engine: Engine, slots: Slots) -> None:
    found = await outcome(engine.servicer(servicer_of), slots, ask(salt=b"one"), ask(salt=b"one"), ask(salt=b"other"))
    assert isinstance(found, RequestError)
    assert "cache_salt" in found.message
    assert "operator" in found.message
    assert len(engine.requests) == 2


async def test_refused_parameters_are_known_before_sending(
    servicer_of: Any, engine: Engine, slots: Slots
) -> None:  # F9
    traits = {"traits": lambda _: Traits("image_grid_thw")}
    async with listening(engine.servicer(servicer_of)) as target, registered(target, slots, **traits) as client:
        known, other = ask(salt=b"one"), ask(salt=b"other")
        several = msgspec.structs.replace(known, num_samples=2)
        others = [other, ask(floats(inline=PIXELS), salt=b"one"), ask(salt=b"one", seed=1), several]

        def are_served(*requests: EngineRequest) -> list[bool]:
            return [client.state.refusal(needs_of_request(one), one.salt) is None for one in requests]

        # To ask does not make a tenant the first.
        assert are_served(other, known) == [True, True]
        [delta async for delta in generate(client, known)]
        assert are_served(known, *others) == [True, False, False, False, False]


async def test_pixels_in_a_form_that_the_worker_does_not_take(servicer_of: Any, engine: Engine, slots: Slots) -> None:
    servicer = engine.servicer(servicer_of)
    assert isinstance(await outcome(servicer, slots, ask(image(inline=PIXELS))), InternalError)
    different = floats(inline=PIXELS, pixel_shape=(12, 4), start=3)
    assert isinstance(await outcome(servicer, slots, ask(floats(inline=PIXELS), different)), InternalError)


async def test_more_pixels_than_a_message_holds(
    servicer_of: Any, engine: Engine, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smg_client, "MAX_INLINE_BYTES", 300)
    asked = ask(floats(inline=PIXELS), floats(inline=PIXELS, start=3))
    assert isinstance(await outcome(engine.servicer(servicer_of), slots, asked), ImageTooLarge)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dp_size": 2}, "data-parallel"),
        ({"speculative_algorithm": "EAGLE3"}, "speculative"),
        ({}, "--kv-events-config"),
    ],
)
async def test_workers_that_cannot_be_known(
    servicer_of: Any, engine: Engine, slots: Slots, fields: dict[str, Any], reason: str
) -> None:  # E5
    engine.arguments = msgspec.structs.replace(engine.arguments, **fields)
    async with listening(engine.servicer(servicer_of)) as target, registered(target, slots) as client:
        assert client.exactness.level == "NONE"
        assert reason in client.exactness.reason


async def test_one_side_of_a_pair_is_no_worker(
    servicer_of: Any, engine: Engine, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:  # A8
    engine.arguments = msgspec.structs.replace(engine.arguments, disaggregation_mode="prefill")
    async with listening(engine.servicer(servicer_of)) as target:
        client = SglangClient(f"sglang://{target}", context(slots))
        await client.start()
        await until(lambda: "?prefill=" in caplog.text)
        await client.close()
    assert client.description is None
