"""`tokenspeed.grpc.scheduler.TokenSpeedScheduler` for this worker's engine.

An SMG gateway calls it to register a worker, route to it and send it requests. The contract is
tokenspeed_scheduler.proto of smg-grpc-proto, and the behaviour is that of smg_grpc_servicer/tokenspeed/servicer.py.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerServicer

from saccade.errors import RequestError, SaccadeError, WorkerUnavailable
from saccade.identity.blocks import root_key
from saccade.protocol.request import EngineRequest
from saccade.tracing.tracer import Tracer
from saccade.transport import shared_memory
from saccade.worker.local_client import LocalClient
from saccade.worker.tokenspeed import tensors
from saccade.worker.tokenspeed.answers import ResponseBuilder, StopSearch
from saccade.worker.tokenspeed.cache_feed import DP_RANK, EventSubscription
from saccade.worker.tokenspeed.images import SALT
from saccade.worker.tokenspeed.model import WireModel
from saccade.worker.tokenspeed.requests import engine_request, text_rules

CHUNK_BYTES = 1 << 20
MAX_CONVERSIONS = 4
"""Requests whose images are converted at a time; each takes several times the memory of its images."""

NO_FOLDER = "/saccade"
"""The first part of the model's path that gateways see. No gateway can read it, so each asks for the engine's files and
does not take those of a folder with an equal name on its own machine."""


class TokenSpeedService(TokenSpeedSchedulerServicer):  # type: ignore[misc]
    """Answers calls with the engine of *client*.

    Cache events are served only with *kv_events*. Methods raise SaccadeError, which ErrorBorder converts to statuses.
    *tracer* traces requests, since their gateway cannot see the engine's stages.
    """

    def __init__(self, client: LocalClient, *, kv_events: bool = False, tracer: Tracer | None = None) -> None:
        self._client = client
        self._kv_events = kv_events
        self._tracer = tracer
        self._model: WireModel | None = None
        self._building = asyncio.Lock()
        self._conversions = asyncio.Semaphore(MAX_CONVERSIONS)
        self._ids: dict[str, str] = {}
        self._started_at, self._started = time.time(), time.monotonic()

    async def Generate(self, message: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Answer one request: chunks if it streams, then one complete answer for each sample."""
        name = message.request_id
        trace = None if self._tracer is None else self._tracer.begin_trace(_headers(context))
        request, answer = await self._begun(message)
        if name in self._ids:
            raise RequestError(f"The request id {name!r} is in use.", "request_id")
        self._ids[name] = request.request_id
        try:
            async with contextlib.aclosing(self._client.generate(request)) as deltas:
                async for delta in deltas:
                    if trace is not None and delta.times is not None:
                        trace.add_engine(delta.times.by_stage)
                    for response in answer.take_delta(delta):
                        yield response
                    if not answer.num_open:
                        return
                    if delta.finish_reason is None and answer.has_ended(delta.index):
                        # A stop string ended the sample; the engine does not know stop strings.
                        self._client.abort_sample(request.request_id, delta.index)
        finally:
            del self._ids[name]
            if self._tracer is not None and trace is not None:
                attributes = {"saccade.request_id": name, "gen_ai.usage.input_tokens": len(request.token_ids)}
                self._tracer.end_trace(trace, "Generate", attributes, has_failed=answer.num_open > 0)

    async def _begun(self, message: pb.GenerateRequest) -> tuple[EngineRequest, ResponseBuilder]:
        """Return the engine's request, with its images, and the builder of its responses.

        Remove the files that the message hands over.
        """
        try:
            model = await self._served()
            async with self._conversions:
                request = await asyncio.to_thread(engine_request, message, model, self._client.new_id())
            rules = text_rules(message)
            search = None
            if rules is not None:
                tokenizer = await asyncio.to_thread(lambda: model.tokenizer)
                search = functools.partial(StopSearch, tokenizer, rules)
        finally:
            tensors.remove_files(message)
        keeps_stop = message.sampling_params.no_stop_trim
        answer = ResponseBuilder(
            message.request_id, request, streams=message.stream, keeps_stop=keeps_stop, search=search
        )
        return request, answer

    async def _served(self) -> WireModel:
        """Return the served model. Raises WorkerUnavailable while no engine is ready."""
        async with self._building:
            description = self._client.description()
            if self._model is None or self._model.description is not description:
                self._model = await asyncio.to_thread(WireModel.of_description, description)
            return self._model

    async def Abort(self, message: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Stop a request. Its call ends with an error, unless the client has already ended the call."""
        request_id = self._ids.get(message.request_id)
        if request_id is None:
            return pb.AbortResponse(success=False, message="There is no such request.")
        self._client.abort(request_id)
        return pb.AbortResponse(success=True)

    async def HealthCheck(self, message: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """Report that an engine is ready; otherwise end with UNAVAILABLE.

        The worker itself checks that the engine makes progress. It never answers with `healthy` false, because SMG
        would then register the worker permanently, with an unknown model.
        """
        self._client.description()
        self._client.connect()
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        model = await self._served()
        described = model.description
        path = f"{NO_FOLDER}/{described.fingerprint.hex()}"
        takes_images = model.images is not None
        return pb.GetModelInfoResponse(
            model_path=path,
            tokenizer_path=path,
            served_model_name=described.model,
            model_type=str(model.config.get("model_type", "")),
            architectures=map(str, model.config.get("architectures") or ()),
            max_context_length=described.max_model_len,
            max_req_input_len=described.max_model_len - 1,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=model.defaults.eos_token_ids,
            pad_token_id=model.token_id("pad_token_id"),
            bos_token_id=model.token_id("bos_token_id"),
            default_sampling_params_json=model.sampling_defaults,
            supports_vision=takes_images,
            supports_multimodal=takes_images,
            supported_modalities=[common_pb2.IMAGE] if takes_images else [],
            model_dtype=described.dtype,
            multimodal_encoder_dtype=model.pixel_dtype,
        )

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        described = (await self._served()).description
        reply = pb.GetServerInfoResponse(
            active_requests=self._client.num_open,
            uptime_seconds=time.monotonic() - self._started,
            max_total_num_tokens=described.num_blocks * described.block_size,
            tokenspeed_version=f"saccade {described.version}",
        )
        reply.start_time.FromSeconds(int(self._started_at))
        reply.server_args.update(
            {
                "served_model_name": described.model,
                "max_num_seqs": described.max_num_seqs,
                "block_size": described.block_size,
            }
        )
        reply.scheduler_info.update({"shm_namespace_id": shared_memory.namespace()})
        return reply

    async def GetLoads(self, message: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        """Report the engine's load. There is one data-parallel rank, 0."""
        described = (await self._served()).description
        self._client.connect()
        load = self._client.load
        num_tokens = load.num_blocks * described.block_size
        num_used = (load.num_blocks - load.num_free_blocks) * described.block_size
        usage = num_used / num_tokens if num_tokens else 0.0
        rank = pb.SchedulerLoad(
            dp_rank=DP_RANK,
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=num_used,
            max_total_num_tokens=described.num_blocks * described.block_size,
            max_running_requests=described.max_num_seqs,
            token_usage=usage,
            active_token_usage=usage,
        )
        is_own_rank = not message.HasField("dp_rank") or message.dp_rank == DP_RANK
        return pb.GetLoadsResponse(
            version=f"saccade {described.version}", dp_rank_count=1, loads=[rank] if is_own_rank else []
        )

    async def GetTokenizer(
        self, message: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send the model's small files as one zip, with its sha256 on the last piece."""
        model = await self._served()
        content, digest = await asyncio.to_thread(lambda: model.bundle)
        for start in range(0, len(content), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(content)
            piece = content[start : start + CHUNK_BYTES]
            yield common_pb2.GetTokenizerChunk(data=piece, sha256=digest if is_last else "")

    async def FlushCache(self, message: common_pb2.FlushCacheRequest, context: Any) -> common_pb2.FlushCacheResponse:
        """Make the engine drop caches that no request uses."""
        try:
            self._client.reset_caches()
        except WorkerUnavailable as error:
            return common_pb2.FlushCacheResponse(success=False, message=error.message)
        return common_pb2.FlushCacheResponse(success=True)

    async def SubscribeKvEvents(
        self, message: common_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Send the cached blocks of this wire's requests, then every change.

        No history is kept, so a call that asks to start from a number other than 0 is refused.
        """
        described = (await self._served()).description
        if not self._kv_events:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                "The worker was started without --kv-events-token-ids: cache events of this wire contain the prompts.",
            )
        if described.resumes_at_states or described.window:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                "This model resumes prompts only where recurrent states, or the blocks of a window, are held. This "
                "wire cannot report them.",
            )
        if message.start_sequence_number:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "No history is kept: subscribe from 0 for a snapshot.")
        # The subscriber's call returns with the metadata, and the first event may come late.
        await context.send_initial_metadata(())
        feed = EventSubscription(root_key(described.fingerprint, SALT), described.block_size)
        yield feed.opening()
        try:
            async with contextlib.aclosing(self._client.block_events()) as messages:
                async for events in messages:
                    if (batch := feed.batch(events)) is not None:
                        yield batch
        except SaccadeError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)


def _headers(context: Any) -> list[tuple[bytes, bytes]]:
    """Return the metadata that a call came with."""
    metadata = context.invocation_metadata() or ()
    return [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in metadata]
