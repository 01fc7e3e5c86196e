"""SMG's own servicer of the TokenSpeed wire, with a scripted engine in TokenSpeed's place."""

import asyncio
import contextlib
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STOPPED = {"type": "stop", "matched": 7}
ANSWERS = [
    ([([1], None), ([2], {"type": "length"})], [[1], [2], []]),
    ([([1], None), ([7], STOPPED)], [[1], [7]]),
    ([([7], STOPPED)], [[7]]),
    ([([1], {"type": "stop", "matched": 9})], [[1], [9]]),
]
"""What an engine gives, step by step, and the token ids of each delta of the answer."""


@dataclass
class Item:
    """What the servicer makes of one image."""

    modality: Any
    feature: Any
    model_specific_data: dict[str, torch.Tensor]
    offsets: list[tuple[int, int]]
    hash: int

    def set_pad_value(self) -> None:
        pass


@dataclass
class Engine:
    """AsyncLLM's surface. *steps* are (token_ids, finish_reason) of one request."""

    steps: list[tuple[list[int], dict[str, Any] | None]]
    model_config: Any
    server_args: Any
    wait_seconds: float = 0.0
    context_len: int = 4096
    max_req_input_len: int = 4096
    gracefully_exit: bool = False
    requests: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    rid_to_state: dict[str, Any] = field(default_factory=dict)

    @property
    def last_receive_tstamp(self) -> float:
        return time.time()

    def auto_create_handle_loop(self) -> None:
        pass

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.rid_to_state.pop(request_id, None)

    async def get_load(self) -> list[Any]:
        return [SimpleNamespace(dp_rank=0, num_reqs=3, num_waiting_reqs=1, num_pages=2)]

    async def generate_request(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        if request.rid.startswith("HEALTH_CHECK"):
            yield {"output_ids": [0], "meta_info": {}}
            return
        self.requests.append(request)
        self.rid_to_state[request.rid] = SimpleNamespace(finished=False)
        count = 0
        for token_ids, reason in self.steps:
            count += len(token_ids)
            meta = {"completion_tokens": count, "prompt_tokens": 4, "cached_tokens": 2, "finish_reason": reason}
            if request.return_logprob:
                # All so far: a number for each token, and its place in the ranking.
                meta["output_token_logprobs"] = [(-float(number), number, None) for number in range(count)]
                meta["output_top_logprobs"] = [[(-0.5, 9, None)] * request.top_logprobs_num for _ in range(count)]
            self.rid_to_state[request.rid].finished = reason is not None
            yield {"output_ids": token_ids, "meta_info": meta}
            await asyncio.sleep(self.wait_seconds)

    @classmethod
    def serving(cls, folder: Path, steps: list[Any], eos_token_id: int, vocab_size: int) -> "Engine":
        """An engine that serves the model in *folder* as `m`."""
        hf_config = SimpleNamespace(model_type="any", architectures=["Any"], eos_token_id=eos_token_id)
        model_config = SimpleNamespace(
            hf_config=hf_config, vocab_size=vocab_size, dtype=torch.bfloat16, is_multimodal=True
        )
        server_args = SimpleNamespace(
            model="somewhere/else",
            tokenizer=str(folder),
            served_model_name="m",
            max_num_seqs=8,
            page_size=16,
            max_total_num_tokens=1024,
        )
        return cls(steps, model_config, server_args)

    def servicer(self, servicer_of: Any) -> Any:
        """SMG's servicer in front of this engine."""
        return servicer_of(self, self.server_args, {"max_total_num_tokens": 1024})


def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SMG's health checks look for the probe's answer every 10 ms, not every half second."""
    from smg_grpc_servicer.health_probe import await_probe

    monkeypatch.setitem(await_probe.__kwdefaults__, "step", 0.01)


@contextlib.contextmanager
def servicer_class(monkeypatch: pytest.MonkeyPatch, *, names_ranks: bool = False) -> Iterator[Any]:
    """SMG's servicer class; the engine's modules that it imports are stand-ins. *names_ranks*: the engine takes ranks."""
    modality = SimpleNamespace(IMAGE="image", VIDEO="video", AUDIO="audio")
    inputs = SimpleNamespace(Modality=modality, MultimodalDataItem=Item, MultimodalInputs=SimpleNamespace)
    contents = {
        "tokenspeed.runtime.multimodal.inputs": vars(inputs),
        "tokenspeed.runtime.multimodal.shm_transport": {"ShmTensorHandle": SimpleNamespace},
        "tokenspeed.runtime.engine.io_struct": {"GenerateReqInput": SimpleNamespace},
    }
    packages = ["tokenspeed", "tokenspeed.runtime", "tokenspeed.runtime.multimodal", "tokenspeed.runtime.engine"]
    for name in [*packages, *contents]:
        module = types.ModuleType(name)
        vars(module).update(contents.get(name, {"__path__": []}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "smg_grpc_servicer.tokenspeed.servicer", raising=False)
    from smg_grpc_servicer.tokenspeed import servicer

    look_often(monkeypatch)
    monkeypatch.setattr(servicer, "_engine_supports_dp_rank_pin", lambda: names_ranks)
    yield servicer.TokenSpeedSchedulerServicer
    sys.modules.pop("smg_grpc_servicer.tokenspeed.servicer", None)
