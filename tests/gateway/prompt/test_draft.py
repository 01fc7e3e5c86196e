"""Placeholders are filled by position."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import ContextLengthExceeded, InvalidValue
from saccade.gateway.config import GatewayConfig
from saccade.gateway.limits.admission import Admission
from saccade.gateway.limits.byte_budget import ByteBudget
from saccade.gateway.openai.requests import ChatMessage, ChatRequest, ContentPart
from saccade.gateway.pictures.decode_pool.pool import DecodePool, DecodePoolConfig
from saccade.gateway.preparation import Preparation
from saccade.gateway.prompt.draft import expand
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.telemetry import Metrics

PAD = 9


@given(
    texts=st.lists(st.lists(st.integers(0, 8), max_size=5), min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 7), min_size=5, max_size=5),
)
def test_every_placeholder_lies_in_its_span(texts: list[list[int]], counts: list[int]) -> None:
    counts = counts[: len(texts) - 1]
    token_ids = [token_id for text in texts[:-1] for token_id in (*text, PAD)] + texts[-1]
    expanded, spans = expand(token_ids, PAD, counts)
    placed = [position for span in spans for position in range(span.start, span.start + span.length)]
    assert [position for position, token_id in enumerate(expanded) if token_id == PAD] == placed
    assert [span.length for span in spans] == counts
    assert [token_id for token_id in expanded if token_id != PAD] == [i for text in texts for i in text]


@pytest.mark.parametrize(("token_ids", "counts"), [([1, PAD], []), ([1], [4]), ([PAD, PAD], [4])])
def test_counts_must_agree(token_ids: list[int], counts: list[int]) -> None:  # A9
    with pytest.raises(InvalidValue, match=f"{token_ids.count(PAD)} images; the messages hold {len(counts)}"):
        expand(token_ids, PAD, counts)


@pytest.mark.parametrize(
    ("messages", "max_model_len"),
    [
        ([ChatMessage("user", "")] * 40_000, 0),
        ([ChatMessage("user", [ContentPart("text", "")] * 400_000)], 0),
        ([ChatMessage("user", "word " * 40_000)], 35_000),  # not so many that their bytes alone tell
    ],
    ids=["messages", "parts", "text"],
)
async def test_long_chats_leave_the_event_loop_free(
    messages: list[ChatMessage], max_model_len: int, tiny_qwen3_vl: Path
) -> None:
    """However little text is in them."""
    served = ServedModel.from_files("tiny", read_model_files(tiny_qwen3_vl), max_model_len)
    config = GatewayConfig()
    pool, admission = DecodePool(DecodePoolConfig()), Admission(config.max_requests, config.max_pixel_bytes)
    prompts = Preparation(config, pool, admission, ByteBudget(1 << 30), Metrics()).prompts
    asked = ChatRequest(model="tiny", messages=messages)

    async def draft() -> None:
        chat = await prompts.read_long(served, asked)
        await prompts.draft(served, asked, chat)

    drafting = asyncio.create_task(draft())
    num_rounds = 0
    while not drafting.done():
        await asyncio.sleep(0.001)
        num_rounds += 1
    with pytest.raises(ContextLengthExceeded):
        await drafting
    assert num_rounds > 10
