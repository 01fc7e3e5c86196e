"""Placeholders are filled by position."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ContextLengthExceeded
from saccade.gateway.chat import PlainPrompt
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart
from saccade.gateway.config import GatewayConfig
from saccade.gateway.prompt.prompt_builder import PromptBuilder
from saccade.gateway.request import Limits
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import MediaLimits
from saccade.models.files import read_model_files
from saccade.telemetry import Metrics


@pytest.mark.ci
@pytest.mark.parametrize(
    ("messages", "max_model_len"),
    [
        ([ChatMessage("user", "")] * 10_000, 0),
        ([ChatMessage("user", [ContentPart("text", "")] * 100_000)], 0),
        ([ChatMessage("user", "word " * 40_000)], 35_000),  # not so many that their bytes alone tell
    ],
    ids=["messages", "parts", "text"],
)
async def test_long_chats_leave_the_event_loop_free(
    messages: list[ChatMessage], max_model_len: int, tiny_qwen3_vl: Path
) -> None:
    """However little text is in them."""
    served = ServedModel.from_files("tiny", read_model_files(tiny_qwen3_vl), max_model_len)
    prompts = PromptBuilder(MediaLimits(), Metrics(), WorkThreads(Limits.of_config(GatewayConfig()).admission))
    asked = ChatRequest(model="tiny", messages=messages)

    async def build() -> None:
        chat = await prompts.read_long(served, asked)
        await prompts.build_prompt(served, asked, chat)

    building = asyncio.create_task(build())
    num_rounds = 0
    while not building.done():
        await asyncio.sleep(0.001)
        num_rounds += 1
    with pytest.raises(ContextLengthExceeded):
        await building
    assert num_rounds > 10


class Recording(WorkThreads):
    """Notes which work went to a thread."""

    def __init__(self) -> None:
        super().__init__(Limits.of_config(GatewayConfig()).admission)
        self.in_thread: list[bool] = []

    async def run_work(self, is_long: bool, num_bytes: int, work: Callable[[], Any]) -> Any:
        self.in_thread.append(is_long)
        return await super().run_work(is_long, num_bytes, work)


@pytest.mark.parametrize(("num_prompts", "in_thread"), [(1, False), (2, False), (128, True)])
async def test_plain_prompts_that_are_long_together_leave_the_event_loop_free(
    num_prompts: int, in_thread: bool, tiny_qwen3_vl: Path
) -> None:
    served = ServedModel.from_files("tiny", read_model_files(tiny_qwen3_vl), 35_000)
    threads = Recording()
    prompts = PromptBuilder(MediaLimits(), Metrics(), threads)
    texts = [PlainPrompt("word " * 1000, f"prompt[{index}]") for index in range(num_prompts)]
    chats = await prompts.read_plain(served, ChatRequest(model="tiny", messages=[]), texts)
    assert len(chats) == num_prompts
    assert threads.in_thread == [in_thread] * num_prompts
