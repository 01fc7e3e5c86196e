"""Gateways over one database, and the calls of OpenAI's SDK by which tests use batches."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import scripted
from waiting import wait_until

from saccade.gateway.config import GatewayConfig
from saccade.gateway.state.settings import StateSettings

CONFIG = GatewayConfig(api_keys=("one", "two"), batch_concurrency=2)
CHATS = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
Open = Callable[..., Any]


def gateways(folder: Path, settings: StateSettings) -> Open:
    """What runs gateways of the model in *folder* over one database."""

    @contextmanager
    def opened(**fields: Any) -> Iterator[scripted.Gateway]:
        with scripted.running(folder, replace(CONFIG, state=settings, **fields)) as gateway:
            gateway.answer_two_tokens()
            yield gateway

    return opened


def chat(custom_id: str, content: Any = "hi", url: str = CHATS, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return client.files.create(file=("requests.jsonl", "\n".join(texts).encode()), purpose="batch").id


def create(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHATS, **fields: Any) -> openai.types.Batch:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def content(client: openai.OpenAI, file: str | None) -> dict[str | None, Any]:
    if file is None:
        return {}
    return {line["custom_id"]: line for line in map(json.loads, client.files.content(file).text.splitlines())}


def counts(batch: openai.types.Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed
