"""Kimi-K3 by our gateway and by a real SMG, to one TokenSpeed worker without an engine: what each sends. # A4 F4"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import images
import numpy as np
import openai
import pytest
import torch
from chats import openai_messages, random_image
from server import Server, free_port, program
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from test_smg import smg
from tokenspeed_worker import TokenSpeedWorker, chunk, complete, listening, zipped

from saccade.models.files import parse_json, read_model_files

pytestmark = pytest.mark.peers

NAME = "Kimi-K3"
OPAQUE, PADDED = random_image(280, 224, 1), random_image(333, 517, 4)
TRANSPARENT = images.random_image(1200, 700, "RGBA")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "look_0", "type": "function", "function": {"name": "look", "arguments": '{"a": "b", "n": 1}'}}
TURNS = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "look_0", "content": "Seen."},
]
CHATS: Mapping[str, dict[str, Any]] = {
    "text": {"messages": TURNS[:1]},
    "image": {"messages": openai_messages(OPAQUE, "What is it?")},
    "transparent": {"messages": openai_messages(TRANSPARENT, "What is it?")},
    "images": {"messages": openai_messages(OPAQUE, PADDED, "Which?")},
    "turns": {"messages": TURNS, "tools": [TOOL]},
    "required": {"messages": TURNS[:1], "tools": [TOOL], "tool_choice": "required"},
}


def worker_of(folder: Path) -> TokenSpeedWorker:
    """A worker that serves the model in *folder*, and to which pixels go inside the messages."""
    files = read_model_files(folder)
    eos = parse_json(files, "generation_config.json")["eos_token_id"]
    worker = TokenSpeedWorker()
    worker.bundle = zipped(dict(files.files))
    worker.shm_namespace = ""
    worker.script = [chunk(40), complete(40, 41, reason="length")]
    described = {"served_model_name": NAME, "eos_token_ids": [eos], "model_type": "kimi_k3", "supports_vision": True}
    worker.info |= described | {"tokenizer_path": str(folder), "model_path": str(folder)}
    return worker


async def sent(worker: TokenSpeedWorker, client: openai.OpenAI) -> list[pb.GenerateRequest]:
    """What the worker gets for each of CHATS."""
    requests = []
    for chat in CHATS.values():
        worker.requests.clear()
        # The answer is two tokens, which need not be a call.
        await asyncio.to_thread(ask, client, chat)
        requests.append(worker.requests[0])
    return requests


def ask(client: openai.OpenAI, chat: Mapping[str, Any]) -> bool:
    """Whether *chat* was answered."""
    try:
        client.chat.completions.create(model=NAME, max_tokens=2, temperature=0, **chat)
    except openai.APIError:
        return False
    return True


def pixels(item: pb.MultimodalItem) -> np.ndarray:
    tensor = item.encoder_input
    return torch.frombuffer(bytearray(tensor.inline), dtype=torch.bfloat16).float().reshape(*tensor.shape).numpy()


def items(both: tuple[pb.GenerateRequest, pb.GenerateRequest]) -> Iterator[tuple[Any, Any]]:
    own, foreign = (request.mm_inputs.items for request in both)
    return zip(own, foreign, strict=True)


async def test_both_send_the_same(checkpoint: Callable[[str], Path]) -> None:
    worker, port = worker_of(checkpoint("kimi_k3")), free_port()
    async with listening(worker) as url:
        with program("gateway", "--worker-url", url, "--port", str(port), "--decode-processes", "1") as process:
            server = Server(port, process)
            await asyncio.to_thread(server.wait_until_ready, 180)
            own = await sent(worker, server.client())
        with smg(url.replace("tokenspeed", "grpc"), flags=("--multimodal-tensor-transport", "inline")) as other:
            await asyncio.to_thread(other.wait_until_ready, NAME, 1)
            foreign = await sent(worker, other.client)
    for name, one, two in zip(CHATS, own, foreign, strict=True):
        assert list(one.tokenized.input_ids) == list(two.tokenized.input_ids), name
        for ours, theirs in items((one, two)):
            assert list(ours.placeholders) == list(theirs.placeholders)
            assert ours.placeholder_token_id == theirs.placeholder_token_id
            assert dict(ours.model_specific_tensors) == dict(theirs.model_specific_tensors)
            assert len(ours.content_hash) == len(theirs.content_hash) == 32
            assert pixels(ours) == pytest.approx(pixels(theirs), abs=1e-4)
    # SMG asks for a call as a JSON array, which is not how the model writes calls.
    assert "kimi_k3_xml" in own[-1].sampling_params.structural_tag
