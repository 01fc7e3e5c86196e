"""SMG's own servicer of SGLang's wire, with a scripted engine in SGLang's place."""

import asyncio
import contextlib
import importlib.util
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as rpc
from smg_servicer import look_often
from tokenspeed_worker import Slots, context
from waiting import until

from saccade.connectors.smg.sglang import SglangClient

LOAD = {
    "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 32, "max_total_num_tokens": 1024,
    "token_usage": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0, "max_running_requests": 8,
    "num_waiting_uncached_tokens": 0, "memory": None, "speculative": None, "lora": None, "disaggregation": None,
    "queues": None,
}  # fmt: skip


class Arguments(msgspec.Struct):
    """ServerArgs, as far as the servicer and its clients read it."""

    tokenizer_path: str
    model_path: str = "somewhere/else"
    served_model_name: str = "m"
    weight_version: str = ""
    preferred_sampling_params: str | None = None
    skip_tokenizer_init: bool = True
    is_embedding: bool = False
    language_only: bool = False
    kv_events_config: str | None = None
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998
    max_running_requests: int = 8
    page_size: int = 1
    dp_size: int = 1
    dtype: str = "bfloat16"
    speculative_algorithm: str | None = None


class EventsConfig(msgspec.Struct):
    """KVEventsConfig, as far as the servicer reads it."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""

    @classmethod
    def from_cli(cls, text: str) -> "EventsConfig":
        return msgspec.json.decode(text, type=cls)


class Sampling:
    """SamplingParams of the engine."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def normalize(self, tokenizer: Any) -> None:
        pass


@dataclass
class Rooms:
    """Where the prompts of prefill legs arrive, by number."""

    arrived: set[int] = field(default_factory=set)


@dataclass
class Engine:
    """The request manager's surface. *steps* are (token_ids, finish_reason) of one request.

    A prefill worker puts the KV cache of a request into its room; a decode worker waits for it there.
    """

    arguments: Arguments
    steps: list[tuple[list[int], dict[str, Any] | None]]
    rooms: Rooms = field(default_factory=Rooms)
    wait_seconds: float = 0.0
    gracefully_exit: bool = False
    requests: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    load_snapshot_reader: Any = field(default_factory=lambda: SimpleNamespace(read_all=list))

    @property
    def last_receive_tstamp(self) -> float:
        return time.time()

    def auto_create_handle_loop(self) -> None:
        pass

    def _cleanup_request_state(self, request_id: str) -> None:
        pass

    def get_server_info(self) -> dict[str, Any]:
        return {"active_requests": 0, "paused": False, "last_receive_time": 0.0}

    async def get_loads(self, include: Any, dp_rank: Any) -> list[Any]:
        return [SimpleNamespace(**LOAD)]

    async def abort_request(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True

    async def generate_request(self, obj: Any, request_id: str, grpc_context: Any = None) -> AsyncIterator[Any]:
        if request_id.startswith("HEALTH_CHECK"):
            yield {"token_ids": [0], "finished": True, "meta_info": {}}
            return
        self.requests.append(obj)
        if self.arguments.disaggregation_mode == "decode":
            await until(lambda: obj.bootstrap_room in self.rooms.arrived)
        count = 0
        for token_ids, reason in self.steps:
            count += len(token_ids)
            meta = {"completion_tokens": count, "prompt_tokens": 4, "cached_tokens": 2, "finish_reason": reason}
            output = {"token_ids": token_ids, "finished": reason is not None, "meta_info": meta}
            if obj.return_logprob:
                # Of this step alone.
                output["output_logprobs"] = {
                    "token_logprobs_val": [-float(number) for number in token_ids],
                    "token_logprobs_idx": token_ids,
                    "top_logprobs_val": [[-0.5] * obj.top_logprobs_num for _ in token_ids],
                    "top_logprobs_idx": [[9] * obj.top_logprobs_num for _ in token_ids],
                }
            await asyncio.sleep(self.wait_seconds)
            if obj.bootstrap_room is not None:
                self.rooms.arrived.add(obj.bootstrap_room)
            yield output

    def servicer(self, servicer_of: Any) -> Any:
        """SMG's servicer in front of this engine."""
        model_info = {
            "max_context_length": 4096, "vocab_size": 512, "supports_vision": True, "model_type": "any",
            "architectures": ["Any"], "eos_token_ids": [7], "pad_token_id": 0, "bos_token_id": 0,
            "max_req_input_len": 4096,
        }  # fmt: skip
        model_config = SimpleNamespace(get_default_sampling_params=dict)
        return servicer_of(self, self.arguments, model_config, model_info, {"max_total_num_tokens": 1024})


def _stand_ins() -> dict[str, dict[str, Any]]:
    """What the servicer imports of the engine and of libraries that need not be here, by module."""
    nothing = SimpleNamespace
    null = SimpleNamespace(NULL=SimpleNamespace(value="null"))
    inputs = ("AbortReq", "BatchEmbeddingOutput", "BatchTokenIDOutput", "FlushCacheReqInput", "FlushCacheReqOutput",
              "GetInternalStateReqOutput", "HealthCheckOutput", "ProfileReq", "ProfileReqOutput", "ProfileReqType",
              "TokenizedEmbeddingReqInput", "TokenizedGenerateReqInput")  # fmt: skip
    found: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "9"},
        "sglang.utils": {"get_exception_traceback": str},
        "sglang.srt.configs.model_config": {"ModelConfig": nothing},
        "sglang.srt.disaggregation.kv_events": {"KVEventsConfig": EventsConfig},
        "sglang.srt.disaggregation.utils": {"FAKE_BOOTSTRAP_HOST": "2.2.2.2", "DisaggregationMode": null},
        "sglang.srt.managers.io_struct": dict.fromkeys(inputs, nothing),
        "sglang.srt.managers.load_snapshot": {"LoadSnapshot": nothing, "create_load_snapshot_reader": nothing},
        "sglang.srt.managers.schedule_batch": {
            "Modality": SimpleNamespace(IMAGE="image"),
            "MultimodalDataItem": nothing,
            "MultimodalProcessorOutput": nothing,
        },
        "sglang.srt.observability.req_time_stats": {
            "APIServerReqTimeStats": nothing, "calibrate_time_diff": nothing, "real_time": time.time,
        },
        "sglang.srt.sampling.sampling_params": {"SamplingParams": Sampling},
        "sglang.srt.server_args": {"ServerArgs": Arguments, "PortArgs": nothing},
        "sglang.srt.utils": {
            "get_bool_env_var": bool, "get_or_create_event_loop": nothing, "kill_process_tree": nothing,
        },
        "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": nothing},
        "sglang.srt.utils.network": {"get_zmq_socket": nothing},
    }  # fmt: skip
    if importlib.util.find_spec("zmq") is None:
        found |= {"zmq": {}, "zmq.asyncio": {"Socket": nothing}}
    return found


@contextlib.contextmanager
def servicer_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SMG's servicer class; the engine's modules that it imports are stand-ins."""
    contents = _stand_ins()
    packages = {name.rpartition(".")[0] for name in contents} | {"sglang.srt"}
    for name in sorted((packages | set(contents)) - {""}):
        module = types.ModuleType(name)
        vars(module).update({"__path__": [], "Socket": SimpleNamespace} | contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, child = name.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    engine_modules = [name for name in sys.modules if name.startswith("smg_grpc_servicer.sglang")]
    for name in engine_modules:
        monkeypatch.delitem(sys.modules, name)
    from smg_grpc_servicer.sglang import servicer

    look_often(monkeypatch)
    yield servicer.SGLangSchedulerServicer
    for name in [name for name in sys.modules if name.startswith("smg_grpc_servicer.sglang")]:
        del sys.modules[name]


@asynccontextmanager
async def listening(servicer: rpc.SglangSchedulerServicer) -> AsyncIterator[str]:
    """Serve on loopback; yield the worker's `host:port`."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    rpc.add_SglangSchedulerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def registered(target: str, slots: Slots, **options: Any) -> AsyncIterator[SglangClient]:
    client = SglangClient(f"sglang://{target}", context(slots, **options))
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
    finally:
        await client.close()


def arguments(folder: Path, **fields: Any) -> Arguments:
    """Arguments of a worker that serves the model in *folder*."""
    return Arguments(tokenizer_path=str(folder), **fields)
