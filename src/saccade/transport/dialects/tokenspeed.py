"""A TokenSpeed worker as a gateway sees it: `tokenspeed.grpc.scheduler.TokenSpeedScheduler`, one call per request."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

from saccade.errors import ImageTooLarge, InternalError, SaccadeError, StartupError, WorkerFailed, WorkerUnavailable
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.media import MediaItem
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.transport import shared_memory, wire
from saccade.transport.backoff import Backoff
from saccade.transport.client import Supply, slots_of
from saccade.transport.dialects import shared_memory_links, tokenspeed_model
from saccade.transport.dialects.shared_memory_links import Links
from saccade.transport.dialects.tokenspeed_messages import (
    LOST,
    Answer,
    check_parameters,
    check_pixels,
    error_of,
    generate_request,
)

SCHEME = "tokenspeed://"
NO_REPORTS = Exactness("NONE", "workers of its kind do not report what they hold")

CALL_SECONDS = 10.0
HEALTH_SECONDS = 25.0
"""A worker's HealthCheck generates a token and has 20 s for it."""

LOADS_EVERY_SECONDS = 5.0
LOADS_PER_HEALTH = 6
BUNDLE_SECONDS = 60.0
MAX_INLINE_BYTES = wire.MAX_MESSAGE_BYTES - (8 << 20)
"""What a request's inline pixels may take of a message; the rest is for its token ids."""

# A server that does not expect pings without calls ends the connection over them; loads are asked for often enough.
OPTIONS = [*wire.CLIENT_OPTIONS, ("grpc.keepalive_permit_without_calls", 0)]

logger = logging.getLogger(__name__)


def _ignore(_: object) -> None:
    pass


def _no_grid(_: ModelFiles) -> str | None:
    return None


def _no_folder(folder: Path) -> ModelFiles:
    raise StartupError(f"{folder} is not read here.")


@dataclass(frozen=True)
class _Session:
    """A worker that has registered. *grid_name* is what its model's pictures call their grid."""

    stub: Any
    description: Description
    eos_token_ids: tuple[int, ...]
    grid_name: str | None
    shares_memory: bool


class TokenSpeedClient:
    """A worker of another project behind the interface of transport.client.WorkerClient.

    *url* is `tokenspeed://host:port`. Every slot of a request given to generate() comes back once for each picture in
    it: through *on_released* when the worker has copied it or will never read it, through *on_discarded* when it may
    still be reading. The model's files are those *given* for its name, else what *read_files* finds in the worker's own
    folder, else what the worker sends. *grid_name* returns the model's name for a picture's grid on this wire.
    """

    def __init__(
        self,
        url: str,
        on_released: Callable[[Sequence[str]], None] = _ignore,
        on_change: Callable[["TokenSpeedClient"], None] = _ignore,
        on_discarded: Callable[[Sequence[str]], None] = _ignore,
        given: Mapping[str, ModelFiles] = MappingProxyType({}),
        read_files: Callable[[Path], ModelFiles] = _no_folder,
        grid_name: Callable[[ModelFiles], str | None] = _no_grid,
    ) -> None:
        self.url = url
        self.description: Description | None = None
        self.load: Load | None = None
        self._target = _target(url)
        self._on_released = on_released
        self._on_change = on_change
        self._on_discarded = on_discarded
        self._given = given
        self._read_files = read_files
        self._grid_name = grid_name
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._calls: set[Any] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def exactness(self) -> Exactness:
        """NONE: nothing is known of its caches."""
        return NO_REPORTS

    @property
    def ready(self) -> bool:
        """Whether the worker has registered and was well when last asked."""
        return self._session is not None

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        shared_memory_links.sweep()
        self._task = asyncio.create_task(self._run(), name=f"worker client {self.url}")

    async def close(self) -> None:
        """End every call; the worker aborts what is still open, and open requests raise WorkerFailed."""
        self._leave()
        for call in list(self._calls):
            call.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def holds(self, salt: bytes, content_hash: bytes) -> bool:
        """Return False: this wire takes no picture without its pixels."""
        return False

    async def kv_events(self, *, blocks: bool, pictures: bool) -> AsyncGenerator[KvEvents, None]:
        """Raise WorkerUnavailable: there is no feed."""
        raise WorkerUnavailable(NO_REPORTS.reason)
        yield

    async def generate(self, request: EngineRequest, supply: Supply | None = None) -> AsyncGenerator[TokenDelta, None]:
        """Send *request* and yield its deltas, the last with a finish reason.

        Closing the iterator early aborts the request at once. Raises WorkerUnavailable where no worker is ready,
        WorkerFailed when it dies or makes no sense, ImageTooLarge for more inline pixels than a message holds,
        UnsupportedParameter for what this wire cannot say, and RequestError, QueueFull or DeadlineExceeded where the
        worker refuses.
        """
        links = Links(self._on_released, self._on_discarded, slots_of(request))
        answer = Answer(request)
        call = None
        try:
            call = await self._send(request, links)
            async for response in call:
                delta = answer.take(response)
                links.collect()
                if delta is not None:
                    yield delta
                if delta is not None and delta.finish_reason is not None:
                    return
            yield answer.close()
        except grpc.aio.AioRpcError as error:
            answer.finished = True
            logger.warning("worker %s ended a request: %s %s", self.url, error.code(), error.details())
            raise error_of(error.code(), begun=answer.begun) from error
        except asyncio.CancelledError:
            # gRPC says so of a call that close() has cancelled.
            if call is None or not call.cancelled() or _cancelling():
                raise
            raise WorkerFailed(LOST) from None
        finally:
            links.settle(sent=call is not None)
            if call is not None and not answer.finished:
                self._abort(call, request.request_id)

    def abort_sample(self, request_id: str, index: int) -> None:
        """Do nothing: this wire's requests have one sample, and generate() is closed to abort it."""

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Return False: this wire has no such command."""
        return False

    async def _send(self, request: EngineRequest, links: Links) -> Any:
        """Begin the call for *request*. Raises what generate() does."""
        session = self._session
        if session is None:
            raise WorkerUnavailable("The worker is not ready; try again shortly.")
        check_parameters(request)
        check_pixels(request, session.description)
        payloads = [await _payload(item, links, session.shares_memory) for item in request.media]
        num_inline_bytes = sum(len(payload) for payload in payloads if isinstance(payload, bytes))
        if num_inline_bytes > MAX_INLINE_BYTES:
            raise ImageTooLarge(
                f"The request's pictures come to {num_inline_bytes} bytes for the model; at most {MAX_INLINE_BYTES} "
                "can be sent to this worker. Send fewer or smaller ones.",
                "messages",
            )
        message = generate_request(request, payloads, session.grid_name, session.eos_token_ids)
        call = session.stub.Generate(message)
        # Kept until the worker has ended it: a call that is dropped before is a cancelled one to the worker.
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _abort(self, call: Any, request_id: str) -> None:
        call.cancel()
        if self._session is not None:
            task = asyncio.create_task(self._say_abort(self._session.stub, request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _say_abort(self, stub: Any, request_id: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            await stub.Abort(pb.AbortRequest(request_id=request_id, reason="The client left."), timeout=CALL_SECONDS)

    async def _run(self) -> None:
        backoff = Backoff(first_seconds=0.05, limit_seconds=1.0, healthy_seconds=5.0)
        said = ""
        async with grpc.aio.insecure_channel(self._target, options=OPTIONS) as channel:
            while True:
                backoff.started()
                reason = await self._live(channel)
                logger.log(logging.DEBUG if reason == said else logging.WARNING, "worker %s: %s", self.url, reason)
                said = reason
                await asyncio.sleep(backoff.after_failure())

    async def _live(self, channel: grpc.aio.Channel) -> str:
        """Register, then watch the worker until it is lost or unwell; return why."""
        try:
            session = await self._register(TokenSpeedSchedulerStub(channel))
            self._enter(session)
            return await self._watch(channel, session)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except SaccadeError as error:
            return error.message
        finally:
            self._leave()

    async def _register(self, stub: Any) -> _Session:
        await _check_health(stub)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CALL_SECONDS)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=CALL_SECONDS)
        files = self._given.get(tokenspeed_model.served_name(info)) or await self._model_files(stub, info)
        description = tokenspeed_model.describe(info, server, files)
        return _Session(
            stub=stub,
            description=description,
            eos_token_ids=tuple(info.eos_token_ids),
            grid_name=self._grid_name(files),
            shares_memory=description.shm_namespace == shared_memory.namespace(),
        )

    async def _model_files(self, stub: Any, info: Any) -> ModelFiles:
        folder = Path(info.tokenizer_path or info.model_path)
        if folder.is_absolute():
            # Most often the folder is on another machine.
            with contextlib.suppress(StartupError, OSError):
                return await asyncio.to_thread(self._read_files, folder)
        chunks = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=BUNDLE_SECONDS)
        return await asyncio.to_thread(tokenspeed_model.unpack_bundle, await tokenspeed_model.receive_bundle(chunks))

    async def _watch(self, channel: grpc.aio.Channel, session: _Session) -> str:
        lost = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        try:
            for number in itertools.count(1):
                reply = await session.stub.GetLoads(pb.GetLoadsRequest(), timeout=CALL_SECONDS)
                self.load = tokenspeed_model.load_of(reply, session.description.block_size)
                if number % LOADS_PER_HEALTH == 0:
                    await _check_health(session.stub)
                if (await asyncio.wait({lost}, timeout=LOADS_EVERY_SECONDS))[0]:
                    break
        finally:
            lost.cancel()
        return "the connection was lost"

    def _enter(self, session: _Session) -> None:
        self.description = session.description
        self._session = session
        self._on_change(self)

    def _leave(self) -> None:
        if self._session is not None:
            self._session = None
            self.load = None
            self._on_change(self)


async def _payload(item: MediaItem, links: Links, shares_memory: bool) -> str | bytes:
    """Return a name for the item's pixels, or themselves where the worker cannot see our memory."""
    slot = item.slot
    if slot is None:
        return item.inline or b""
    if shares_memory and (name := links.lend(slot)) is not None:
        return name
    try:
        pixels = await asyncio.to_thread(shared_memory.read_slot, slot)
    except shared_memory.SlotError as error:
        raise InternalError("A picture was lost on its way to the worker; the request can be sent again.") from error
    links.put_back(slot)
    return pixels


async def _check_health(stub: Any) -> None:
    if not (await stub.HealthCheck(pb.HealthCheckRequest(), timeout=HEALTH_SECONDS)).healthy:
        raise WorkerUnavailable("The worker says that it is not well.")


def _cancelling() -> bool:
    """Whether the running task has been asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _target(url: str) -> str:
    """Return `host:port` of *url*. Raises StartupError."""
    try:
        return wire.target("grpc://" + url.removeprefix(SCHEME)) if url.startswith(SCHEME) else wire.target("")
    except StartupError as error:
        raise StartupError(f"The address of a TokenSpeed worker is {SCHEME}host:port, not {url!r}.") from error
