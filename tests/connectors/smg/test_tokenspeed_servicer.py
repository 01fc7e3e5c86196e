"""The client of the TokenSpeed wire against SMG's own servicer, with a scripted engine in TokenSpeed's place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from smg_servicer import ANSWERS, STOPPED, Engine, servicer_class
from streams import generate
from tokenspeed_worker import FILES, PIXELS, Slots, ask, image, listening, registered
from waiting import until

from saccade.errors import QueueFull, SaccadeError, WorkerFailed
from saccade.protocol.media import Span
from saccade.protocol.output import FinishReason
from saccade.protocol.request import Grammar


@pytest.fixture
def servicer_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SMG's servicer class; the engine's modules that it imports are stand-ins."""
    with servicer_class(monkeypatch) as found:
        yield found


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    for name, content in FILES.files.items():
        (tmp_path / name).write_bytes(content)
    return Engine.serving(tmp_path, [([1, 2], None), ([3, 7], STOPPED)], eos_token_id=7, vocab_size=512)


@pytest.fixture
def servicer(servicer_of: Any, engine: Engine) -> Any:
    return engine.servicer(servicer_of)


async def test_registration(servicer: Any, slots: Slots) -> None:  # A5
    async with listening(servicer) as url, registered(url, slots) as client:
        described = client.description
        await until(lambda: client.load)
        load = client.load
    assert described is not None
    assert load is not None
    assert described.files == FILES
    assert (described.model, described.max_model_len, described.max_num_seqs) == ("m", 4096, 8)
    assert (described.block_size, described.num_blocks, described.pixel_dtype) == (16, 64, "bfloat16")
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (2, 1, 62)


async def test_pixels_and_answer(servicer: Any, engine: Engine, slots: Slots) -> None:
    read = slots.filled(), slots.filled(PIXELS[::-1])
    media = (image(read[0]), image(read[1], 3, content_hash=bytes(range(32, 64))), image(inline=PIXELS, start=5))
    async with listening(servicer) as url, registered(url, slots) as client:
        assert client.description is not None
        deltas = [delta async for delta in generate(client, ask(*media, temperature=0.0))]
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [
        ([1, 2], None),
        ([3, 7], FinishReason.STOP),
    ]
    assert deltas[0].num_cached_tokens == 2
    assert slots.released == [ref.name for ref in read]
    (request,) = engine.requests
    assert (request.sampling_params["stop_token_ids"], request.sampling_params["ignore_eos"]) == ([7], False)
    items = request.precomputed_multimodal_inputs.mm_items
    values = [item.feature.view(torch.uint8).flatten().tolist() for item in items]
    assert [bytes(value) for value in values] == [PIXELS, PIXELS[::-1], PIXELS]
    assert [item.feature.shape for item in items] == [(8, 6)] * 3
    assert [item.offsets for item in items] == [[(1, 2)], [(3, 4)], [(5, 6)]]
    assert items[1].hash == int.from_bytes(bytes(range(32, 40)), "little")
    assert items[0].model_specific_data["a_grid"].tolist() == [[1, 2, 4]]
    assert items[0].model_specific_data["patches_per_image"].tolist() == [8]


async def test_a_structural_tag(servicer: Any, engine: Engine, slots: Slots) -> None:  # F13
    async with listening(servicer) as url, registered(url, slots) as client:
        assert [delta async for delta in generate(client, ask(grammar=Grammar("structural_tag", "{}")))]
        assert [delta async for delta in generate(client, ask())]
    assert [request.sampling_params.get("structural_tag") for request in engine.requests] == ["{}", None]


@pytest.mark.parametrize(("steps", "expected"), ANSWERS)
async def test_answers(servicer: Any, engine: Engine, slots: Slots, steps: Any, expected: Any) -> None:
    engine.steps = steps
    async with listening(servicer) as url, registered(url, slots) as client:
        deltas = [delta async for delta in generate(client, ask())]
    assert [delta.token_ids for delta in deltas] == expected


@pytest.mark.parametrize("num_logprobs", [0, 2])
async def test_log_probabilities(servicer: Any, engine: Engine, slots: Slots, num_logprobs: int) -> None:
    async with listening(servicer) as url, registered(url, slots) as client:
        deltas = [delta async for delta in generate(client, ask(num_logprobs=num_logprobs))]
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert [delta.token_ids for delta in deltas] == [[1, 2], [3, 7]]
    assert [entry.logprob for entry in logprobs] == [0.0, -1.0, -2.0, -3.0]
    assert [entry.top_ids for entry in logprobs] == [[9] * num_logprobs] * 4


@pytest.mark.parametrize(("status", "error"), [(429, QueueFull), (None, WorkerFailed)])
async def test_abort_by_the_engine(
    servicer: Any, engine: Engine, slots: Slots, status: int | None, error: type[SaccadeError]
) -> None:
    engine.steps = [([1], None), ([], {"type": "abort", "message": "inner words", "status_code": status})]
    async with listening(servicer) as url, registered(url, slots) as client:
        with pytest.raises(error) as caught:
            [delta async for delta in generate(client, ask())]
    assert "inner" not in caught.value.message


async def test_closing_aborts_at_the_engine(servicer: Any, engine: Engine, slots: Slots) -> None:
    engine.wait_seconds = 60.0
    async with listening(servicer) as url, registered(url, slots) as client:
        deltas = generate(client, ask())
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: "r1" in engine.aborted)


async def test_placeholders_of_an_interrupted_item(servicer: Any, engine: Engine, slots: Slots) -> None:
    item = image(inline=PIXELS, spans=(Span(1, 1), Span(2, 1)))
    async with listening(servicer) as url, registered(url, slots) as client:
        [delta async for delta in generate(client, ask(item))]
    assert engine.requests[0].precomputed_multimodal_inputs.mm_items[0].offsets == [(1, 1), (2, 2)]
