"""The client for a worker with one of SMG's scheduler wires. It makes one call per request.

TokenSpeed's wire and SGLang's (packages of `smg-grpc-proto`) have calls of the same names to register, watch, abort and
follow caches, and answers with the same fields. tokenspeed.py and sglang.py have the differences.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import grpc
import msgspec
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import common_pb2

from saccade.connectors.answer_bounds import NOT_ASKED_FOR
from saccade.connectors.context import ClientContext
from saccade.connectors.events import published_events
from saccade.connectors.events.reported_cache import KeyContext, ReportedCache
from saccade.connectors.events.sent_images import NO_TENANT, SentImages
from saccade.connectors.rank_urls import RankedAddresses
from saccade.connectors.session import NOT_READY, Connector, slots_of
from saccade.connectors.sink import Sink, Stream
from saccade.connectors.smg import kv_events, shared_memory_links
from saccade.connectors.smg import model as smg_model
from saccade.connectors.smg.answer import SmgAnswer, error_of
from saccade.connectors.smg.session import SmgSession
from saccade.connectors.smg.shared_memory_links import Links
from saccade.connectors.worker_state import Refusals, not_served
from saccade.errors import (
    ImageTooLarge,
    InternalError,
    SaccadeError,
    StartupError,
    UnsupportedParameter,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import EXACT, Exactness, least
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.media import MediaItem
from saccade.protocol.needs import Need, needs_of_request
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.transport import lasting_task, shared_memory, wire
from saccade.transport.grpc_call import Call
from saccade.transport.grpc_calls import GrpcCalls

SOME_TOKENS = "its model has layers that do not keep every token, and its events do not tell where a prompt can resume"
TENANTS_OF_ANOTHER = "its events do not name tenants, and the process that reads them is not the one that sends prompts"

CALL_SECONDS = 10.0
HEALTH_SECONDS = 25.0
"""A worker's HealthCheck generates a token and has 20 s for it."""

LOADS_EVERY_SECONDS = 5.0
LOADS_PER_HEALTH = 6
BUNDLE_SECONDS = 60.0
MAX_INLINE_BYTES = wire.MAX_MESSAGE_BYTES - (8 << 20)
"""The most bytes of a message for a request's inline pixels; the rest is for its token ids."""

MAX_PAGES = 1 << 23
"""A page may have one token. A worker with more is not followed: they would take more memory than routing is worth."""

MAX_REPLY_BYTES = 8 << 20
"""Of a message, except those of Generate. Files come in small parts, and a batch of events has those of one step."""

REFUSALS = {
    Need.SEVERAL_ANSWERS: not_served("n"),
    Need.ALLOWED_TOKENS: not_served("allowed_token_ids"),
    Need.PROMPT_LOGPROBS: not_served("prompt_logprobs"),
}
NO_IMAGES = UnsupportedParameter("Images for this model are not served by its workers.", "messages")

OPTIONS = {  # of two values with one name gRPC takes the first
    **dict(wire.CLIENT_OPTIONS),
    "grpc.max_receive_message_length": MAX_REPLY_BYTES,
    # A server that expects no pings without calls ends the connection over them. Asking for loads is often enough.
    "grpc.keepalive_permit_without_calls": 0,
}

logger = logging.getLogger(__name__)


class SmgClient(Connector[SmgSession]):
    """The client for a worker of another project, or for one of its data-parallel ranks.

    *url* is one of ADDRESSES. *rank* is None for a whole worker. *sent* notes what the worker was sent, if that
    explains its events.
    """

    ADDRESSES: ClassVar[RankedAddresses]
    MESSAGES: ClassVar[Any]
    """The generated module of the wire's messages."""

    STUB: ClassVar[Any]
    KNOWN: ClassVar[Exactness]
    """The best level at which the events of such a worker report what it holds."""

    def __init__(self, url: str, context: ClientContext, sent: SentImages) -> None:
        super().__init__(url, context)
        address = self.ADDRESSES.read_worker(url)
        self._target, self.rank = urlsplit(address.server).netloc, address.rank
        self.host = self._target.rpartition(":")[0].strip("[]")
        self._sent = sent
        self._cache: ReportedCache | None = None
        (service,) = self.MESSAGES.DESCRIPTOR.services_by_name.values()
        self.method = f"/{service.full_name}/Generate"
        self.calls = GrpcCalls(self._target)
        self._aborts: set[asyncio.Task[None]] = set()

    @abstractmethod
    def describe(self, info: Any, server: Any, files: ModelFiles) -> Description:
        """Return what GetModelInfo and GetServerInfo report. Raises StartupError for a worker that cannot be used."""

    @abstractmethod
    def message(self, request: EngineRequest, payloads: Sequence[str | bytes], session: SmgSession) -> Any:
        """Return *request* as this wire's GenerateRequest; *payloads* are its pixels, or names of shared memory."""

    def begin(self, request: EngineRequest) -> None:  # most wires have nothing to note
        """Note that *request* is sent now."""

    def refusals(self, session: SmgSession) -> Refusals:
        """Return what these wires lack. They could not abort one of several samples."""
        return REFUSALS if session.traits.grid_name is not None else {Need.IMAGES: NO_IMAGES, **REFUSALS}

    def unknowable(self, server: Any) -> str:
        """Return, from GetServerInfo, why the worker's events cannot be read, or "" if they can."""
        return kv_events.SEVERAL_CACHES if self.rank is None and smg_model.num_ranks(server) > 1 else ""

    @property
    def exactness(self) -> Exactness:
        """How exactly the worker's events report what it holds."""
        if self._session is None:
            return Exactness("NONE", "it is not ready")
        if self._cache is not None:
            known = self._cache.exactness
        else:
            known = EXACT if self._sent.salts == NO_TENANT else Exactness("DEGRADED", TENANTS_OF_ANOTHER)
        return least(self._session.exactness, known)

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        shared_memory_links.sweep()
        await super().start()

    async def close(self) -> None:
        """End every call; the worker aborts what is still open, and open requests raise WorkerFailed."""
        self._leave()
        self.calls.close()
        await super().close()

    def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the blocks that the worker stores and drops; its events do not report encoder outputs.

        Earlier blocks come first if the engine replays them. Raises WorkerUnavailable if there is no feed, or it ends.
        """
        session = self._session
        if session is None:
            raise WorkerUnavailable(NOT_READY)
        if session.exactness.level == "NONE":
            raise WorkerUnavailable(session.exactness.reason)
        description = session.description
        context = KeyContext(
            fingerprint=description.fingerprint,
            block_size=description.block_size,
            page_size=session.page_size,
            max_model_len=description.max_model_len,
            max_pages=MAX_PAGES,
        )
        self._cache = ReportedCache(context, self._sent)
        return self._feed(session, self._cache)

    async def _feed(self, session: SmgSession, cache: ReportedCache) -> AsyncGenerator[KvEvents, None]:
        """Yield what the engine publishes, if it can be reached, or else what its gRPC servicer relays.

        The engine keeps its latest batches for replay, which may cover what it stored before the gateway listened. Its
        token ids may exceed 32 bits, as SGLang's pads (since 0.5.23) do.
        """
        has_begun = False
        if session.publisher is not None:
            try:
                async with contextlib.aclosing(published_events.follow(session.publisher, cache)) as messages:
                    async for message in messages:
                        has_begun = True
                        yield message
            except WorkerUnavailable as error:
                if has_begun:
                    raise
                logger.info("worker %s: its gRPC feed of cache events is followed: %s", self.url, error.message)
        note_load = partial(self._note_pushed_load, session.description.num_blocks)
        async with contextlib.aclosing(kv_events.follow(session.stub, cache, self.rank, note_load)) as messages:
            async for message in messages:
                yield message

    def _note_pushed_load(self, num_blocks: int, record: common_pb2.EngineLoad) -> None:
        """Keep the load in *record*, which was true when the engine wrote it, *age_ms* ago."""
        self._note_load(smg_model.pushed_load_of(record, num_blocks), time.monotonic() - record.age_ms / 1000)

    def generate(
        self,
        request: EngineRequest,
        sink: Sink,
        chat: object = None,
        complete: Callable[[Any], object] = lambda _: None,
    ) -> Stream:
        """Send *request*, to whose message *complete* may add; its deltas go to *sink*.

        Raises WorkerUnavailable if the worker is not ready. The sink fails with WorkerFailed if it dies or sends
        nonsense, with ImageTooLarge for more inline pixels than a message holds, and with UnsupportedParameter for what
        this wire cannot express. If the worker refuses, the error is RequestError, QueueFull or DeadlineExceeded.
        """
        session = self._session_for(request)
        links = Links(self.context.on_released, self.context.on_discarded, slots_of(request))
        return _SmgStream(request, sink, links, partial(self._message, session, request, links, complete), self)

    async def _message(
        self, session: SmgSession, request: EngineRequest, links: Links, complete: Callable[[Any], object]
    ) -> Any:
        """Return the message for *request*, which is sent now. Raises what the sink of generate() fails with."""
        if error := self.state.refusal(needs_of_request(request), request.salt):
            raise error
        self.begin(request)
        _check_pixels(request, session.description)
        payloads = [await _payload(item, links, session.shares_memory) for item in request.media]
        num_inline_bytes = sum(len(payload) for payload in payloads if isinstance(payload, bytes))
        if num_inline_bytes > MAX_INLINE_BYTES:
            raise ImageTooLarge(
                f"The request's images come to {num_inline_bytes} bytes for the model; at most {MAX_INLINE_BYTES} "
                "can be sent to this worker. Send fewer or smaller ones.",
                "messages",
            )
        message = self.message(request, payloads, session)
        complete(message)
        self._sent.add(request)
        return message

    def response(self, payload: bytes) -> Any:
        """Return the message in *payload*. Raises WorkerFailed if it is not one."""
        try:
            return self.MESSAGES.GenerateResponse.FromString(payload)
        except DecodeError:
            raise WorkerFailed(NOT_ASKED_FOR) from None

    def abort(self, request_id: str) -> None:
        """Tell the worker that a request was cancelled."""
        if self._session is not None:
            task = asyncio.create_task(self._say_abort(self._session.stub, request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _say_abort(self, stub: Any, request_id: str) -> None:
        request = self.MESSAGES.AbortRequest(request_id=request_id, reason="The client left.")
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            await stub.Abort(request, timeout=CALL_SECONDS)

    async def _run(self) -> None:
        async with grpc.aio.insecure_channel(self._target, options=[*OPTIONS.items()]) as self._channel:
            await super()._run()

    async def _live(self) -> str:
        """Register, then watch the worker until it is lost or unhealthy; return why."""
        try:
            stub = self.STUB(self._channel)
            await self._check_health(stub)
            loads = await self._loads(stub)
            session = await self._register(stub, loads.reply)
            self._enter(session, session.description)
            return await self._watch(session, loads)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except SaccadeError as error:
            return error.message
        finally:
            self._leave()

    async def _register(self, stub: Any, loads: Any) -> SmgSession:
        info = await stub.GetModelInfo(self.MESSAGES.GetModelInfoRequest(), timeout=CALL_SECONDS)
        server = await stub.GetServerInfo(self.MESSAGES.GetServerInfoRequest(), timeout=CALL_SECONDS)
        files = self.context.model_files.get(smg_model.served_name(info)) or await self._model_files(stub, info)
        description = self.describe(info, server, files)
        if limit := smg_model.max_running(loads, self.rank):
            # The server's arguments may lack it, or count all ranks together.
            description = msgspec.structs.replace(description, max_num_seqs=limit)
        traits = self.context.traits(files)
        reason = "" if traits.keeps_every_token else SOME_TOKENS
        reason = reason or self.unknowable(server) or await kv_events.reason_for_none(stub)
        return SmgSession(
            stub=stub,
            description=description,
            eos_token_ids=tuple(info.eos_token_ids),
            traits=traits,
            shares_memory=description.shm_namespace == shared_memory.namespace(),
            exactness=Exactness("NONE", reason) if reason else self.KNOWN,
            page_size=smg_model.page_tokens(server),
            publisher=smg_model.event_source_of(server, self.host, self.rank),
        )

    async def _model_files(self, stub: Any, info: Any) -> ModelFiles:
        folder = Path(info.tokenizer_path or info.model_path)
        if folder.is_absolute():
            # Most often the folder is on another machine.
            with contextlib.suppress(StartupError, OSError):
                return await asyncio.to_thread(self.context.read_files, folder)
        chunks = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=BUNDLE_SECONDS)
        return await asyncio.to_thread(smg_model.unpack_bundle, await smg_model.receive_bundle(chunks))

    async def _watch(self, session: SmgSession, loads: "_Loads") -> str:
        lost = asyncio.ensure_future(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        try:
            for number in itertools.count(1):
                load = smg_model.load_of(loads.reply, session.description.block_size, self.rank)
                self._note_load(load, loads.asked_at)
                if number % LOADS_PER_HEALTH == 0:
                    await self._check_health(session.stub)
                if (await asyncio.wait({lost}, timeout=LOADS_EVERY_SECONDS))[0]:
                    break
                loads = await self._loads(session.stub)
        finally:
            lost.cancel()
        return "the connection was lost"

    async def _loads(self, stub: Any) -> "_Loads":
        """Ask for the loads of all ranks: older servers filter none."""
        asked_at = time.monotonic()
        return _Loads(await stub.GetLoads(self.MESSAGES.GetLoadsRequest(), timeout=CALL_SECONDS), asked_at)

    async def _check_health(self, stub: Any) -> None:
        if not (await stub.HealthCheck(self.MESSAGES.HealthCheckRequest(), timeout=HEALTH_SECONDS)).healthy:
            raise WorkerUnavailable("The worker reports that it is not healthy.")


class _Loads(NamedTuple):
    """The reply to GetLoads, and the time of the monotonic clock when it was asked for, in seconds."""

    reply: Any
    asked_at: float


async def _payload(item: MediaItem, links: Links, shares_memory: bool) -> str | bytes:
    """Return a name for the item's pixels, or the pixels if the worker cannot see our memory."""
    slot = item.slot
    if slot is None:
        return item.inline or b""
    if shares_memory and (name := links.lend(slot)) is not None:
        return name
    try:
        pixels = await asyncio.to_thread(shared_memory.read_slot, slot)
    except shared_memory.SlotError as error:
        raise InternalError("An image was lost on its way to the worker; the request can be sent again.") from error
    links.put_back(slot)
    return pixels


def _check_pixels(request: EngineRequest, description: Description) -> None:
    """Raise InternalError for missing pixels, or pixels in a form that the worker does not take."""
    for item in request.media:
        if item.pixel_dtype != description.pixel_dtype:
            raise InternalError(f"The images are {item.pixel_dtype}; this worker takes {description.pixel_dtype}.")
        if item.slot is None and item.inline is None:
            raise InternalError("An image came without pixels, which this worker does not keep.")


class _SmgStream:
    """The stream of *request*: its call, once *message* has made its message, and what receives the answer.

    *links* are settled when it ends.
    """

    def __init__(
        self,
        request: EngineRequest,
        sink: Sink,
        links: Links,
        message: Callable[[], Coroutine[Any, Any, Any]],
        client: SmgClient,
    ) -> None:
        self._request_id = request.request_id
        self._metadata = [(b"traceparent", request.traceparent.encode())] if request.traceparent else []
        self._sink = sink
        self._links = links
        self._client = client
        self._answer = SmgAnswer(request)
        self._call: Call | None = None
        self._has_ended = False
        self._sending = asyncio.create_task(self._send(message), name=f"request to {client.url}")

    def abort_sample(self, index: int) -> None:
        """Do nothing: these servers cannot stop one sample. It ends by itself, or with the whole request."""

    async def close(self) -> None:
        """Abort the request unless it has ended."""
        try:
            await lasting_task.end(self._sending)
        finally:
            self._settle()

    def message(self, payload: bytes) -> None:
        """Hand over what a message adds."""
        if not self._has_ended:
            self._hand_over(lambda: self._answer.take(self._client.response(payload)))

    def end(self, status: grpc.StatusCode, details: str) -> None:
        """Fail the request unless its answer is whole."""
        self._answer.finished = True
        if self._has_ended:
            return
        if status is grpc.StatusCode.OK:
            self._hand_over(self._answer.close)
            return
        # The details may quote the request; the worker's own log has them.
        logger.warning("worker %s ended a request: %s", self._client.url, status)
        self._fail(error_of(status, begun=self._answer.begun))

    async def _send(self, message: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            encoded = (await message()).SerializeToString()
            self._call = await self._client.calls.begin(self._client.method, encoded, self, self._metadata)
        except OSError as error:
            logger.warning("worker %s does not accept a connection: %s", self._client.url, error)
            self._fail(WorkerUnavailable(NOT_READY))
        except Exception as error:
            self._fail(error)

    def _hand_over(self, read: Callable[[], TokenDelta | None]) -> None:
        try:
            delta = read()
            self._links.collect()
            if delta is not None:
                if delta.finish_reason is not None:
                    self._settle()
                self._sink.delta(delta)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._settle()
        self._sink.fail(error)

    def _settle(self) -> None:
        """Give back the slots, once, and cancel the call unless the worker has ended its answer."""
        if self._has_ended:
            return
        self._has_ended = True
        self._links.settle(sent=self._call is not None)
        if self._call is not None and not self._answer.finished:
            self._call.cancel()
            self._client.abort(self._request_id)
