"""A TokenSpeed worker without an engine: `python -m benchmarks.gateway.tokenspeed_worker FOLDER --port N`.

It registers with both gateways, stamps the receipt of every request before anything else, unlinks the shared memory
that it was given as a consumer must (it does not read it, unless told to), and answers with its receipt.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from benchmarks.gateway.receipt import RECEIPT_TOKENS, STEP_SECONDS, Receipts, now_ns
from saccade.transport.shared_memory import FOLDER, namespace

SERVICE = pb.DESCRIPTOR.services_by_name["TokenSpeedScheduler"].full_name
LARGE_BYTES = 1 << 20
"""A larger message has its pixels in it; to parse them would be more than an engine's front does before it has it."""

OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 64 << 20),
    ("grpc.http2.bdp_probe", 1),
]


class Worker:
    """The calls that a gateway makes."""

    def __init__(self, folder: Path, model: str, read_pixels: bool) -> None:
        self._folder = folder
        self._model = model
        self._read_pixels = read_pixels
        self._config = json.loads((folder / "config.json").read_text())
        self._receipts = Receipts(folder)

    async def generate(self, message: bytes, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Answer with one chunk, where a stream is asked for, and the completion."""
        received_ns = now_ns()
        num_bytes = len(message)
        request = pb.GenerateRequest.FromString(message) if num_bytes < LARGE_BYTES else pb.GenerateRequest(stream=True)
        for item in request.mm_inputs.items:
            if item.encoder_input.WhichOneof("payload") == "shm":
                num_bytes += item.encoder_input.shm.nbytes
                self._consume(item.encoder_input.shm)
        num_tokens = request.sampling_params.max_new_tokens
        if num_tokens > RECEIPT_TOKENS:
            async for response in self._stream(request.request_id, received_ns, num_bytes, num_tokens):
                yield response
            return
        ids = self._receipts.ids(received_ns, num_bytes)
        counts = {"prompt_tokens": 1, "completion_tokens": len(ids)}
        if request.stream:
            chunk = pb.GenerateStreamChunk(token_ids=ids, **counts)
            yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
        complete = pb.GenerateComplete(output_ids=ids, finish_reason="stop", **counts)
        yield pb.GenerateResponse(request_id=request.request_id, complete=complete)

    async def _stream(
        self, request_id: str, received_ns: int, num_bytes: int, num_tokens: int
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yield a chunk of one token in every step."""
        ids = self._receipts.streamed(received_ns, num_bytes, num_tokens)
        for number, token_id in enumerate(ids, 1):
            await asyncio.sleep(STEP_SECONDS)
            chunk = pb.GenerateStreamChunk(token_ids=[token_id], prompt_tokens=1, completion_tokens=number)
            yield pb.GenerateResponse(request_id=request_id, chunk=chunk)
        complete = pb.GenerateComplete(
            output_ids=ids, finish_reason="length", prompt_tokens=1, completion_tokens=num_tokens
        )
        yield pb.GenerateResponse(request_id=request_id, complete=complete)

    def _consume(self, handle: common_pb2.ShmHandle) -> None:
        path = FOLDER / handle.name
        if self._read_pixels:
            with path.open("rb") as file:
                file.seek(handle.offset)
                file.read(handle.nbytes)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()

    async def model_info(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        """Name the model, and its folder, which the gateways read themselves."""
        folder = str(self._folder.resolve())
        return pb.GetModelInfoResponse(
            model_path=folder,
            tokenizer_path=folder,
            served_model_name=self._model,
            model_type=self._config["model_type"],
            architectures=self._config["architectures"],
            max_context_length=262144,
            max_req_input_len=262144,
            vocab_size=512,
            eos_token_ids=[self._config["eos_token_id"]],
            supports_vision=True,
            supports_multimodal=True,
            supported_modalities=[common_pb2.IMAGE],
            model_dtype="bfloat16",
            multimodal_encoder_dtype="bfloat16",
        )

    async def server_info(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        """Say what /dev/shm this process sees, for `auto` tensor transport."""
        reply = pb.GetServerInfoResponse(tokenspeed_version="none", max_total_num_tokens=1 << 20, uptime_seconds=1.0)
        reply.server_args.update({"max_num_seqs": 256, "block_size": 16})
        reply.scheduler_info.update({"shm_namespace_id": namespace()})
        return reply

    async def loads(self, request: Any, context: Any) -> pb.GetLoadsResponse:
        """Never be busy."""
        load = pb.SchedulerLoad(max_total_num_tokens=1 << 20, max_running_requests=256)
        return pb.GetLoadsResponse(version="none", dp_rank_count=1, loads=[load])

    async def health(self, request: Any, context: Any) -> pb.HealthCheckResponse:
        """Always be well."""
        return pb.HealthCheckResponse(healthy=True)

    async def abort(self, request: Any, context: Any) -> pb.AbortResponse:
        """Have nothing to abort."""
        return pb.AbortResponse(success=True)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service. Generate gets its message as bytes: the stamp comes before the parsing."""
        unary = {
            "HealthCheck": (self.health, pb.HealthCheckRequest),
            "Abort": (self.abort, pb.AbortRequest),
            "GetModelInfo": (self.model_info, pb.GetModelInfoRequest),
            "GetServerInfo": (self.server_info, pb.GetServerInfoRequest),
            "GetLoads": (self.loads, pb.GetLoadsRequest),
        }
        calls = {
            name: grpc.unary_unary_rpc_method_handler(call, kind.FromString, lambda reply: reply.SerializeToString())
            for name, (call, kind) in unary.items()
        }
        generate = grpc.unary_stream_rpc_method_handler(self.generate, None, pb.GenerateResponse.SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, {**calls, "Generate": generate})


async def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--read-pixels", action="store_true")
    arguments = parser.parse_args()
    server = grpc.aio.server(options=OPTIONS)
    worker = Worker(arguments.folder, arguments.model, arguments.read_pixels)
    server.add_generic_rpc_handlers((worker.handlers(),))
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    await server.start()
    print("listening", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
