"""The client for a vLLM server. Prompts go over HTTP as token ids or, if the server takes none, as chats."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import aiohttp
import msgspec

from saccade.connectors.context import ClientContext
from saccade.connectors.events.published_events import follow
from saccade.connectors.events.reported_cache import ReportedCache
from saccade.connectors.session import LOST, NOT_READY, Connector, slots_of
from saccade.connectors.sink import Sink, Stream
from saccade.connectors.vllm import server as vllm_server
from saccade.connectors.vllm.answer import VllmAnswer, error_of
from saccade.connectors.vllm.http import Http, VllmAddress, address, events
from saccade.connectors.vllm.messages import chat_body, generate_body
from saccade.connectors.vllm.pulled_stream import PulledStream
from saccade.connectors.vllm.server import CHAT, GENERATE, Server
from saccade.connectors.worker_state import CHATS_ONLY, Refusals, not_served
from saccade.errors import (
    InternalError,
    SaccadeError,
    UnsupportedParameter,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.description import Description
from saccade.protocol.exactness import EXACT, Exactness, least
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.needs import Need
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels

WATCH_EVERY_SECONDS = 5.0
KEPT_IMAGE_BYTES = 1 << 30
"""vLLM keeps 4 GiB of them by default."""

THREAD_FROM_TOKENS = 8192

AWAY = Exactness("NONE", "it has not been reached yet")
REFUSALS = {Need.PROMPT_LOGPROBS: not_served("prompt_logprobs")}
REFUSALS_OF_CHATS = {
    **REFUSALS,
    # Flags of the server decide whether it would wait for the end of the reasoning.
    Need.GRAMMAR: UnsupportedParameter("This model's workers take chats only, and no grammars.", "response_format"),
    Need.TOKEN_IDS: CHATS_ONLY,
}
OTHER_TOKENS = Exactness("NONE", "it tokenises chats differently than its model's files say")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _VllmSession:
    """A worker while it is healthy."""

    http: Http
    server: Server


class VllmClient(Connector[_VllmSession]):
    """A gateway's connections to one vLLM server, or one data-parallel rank of it.

    *url* is the address of one worker. Pixels must be inline: slots of a request passed to generate() are refused and
    released.
    """

    LIMIT_SECONDS, HEALTHY_SECONDS = 5.0, 10.0

    def __init__(self, url: str, context: ClientContext) -> None:
        super().__init__(url, context)
        self._address: VllmAddress = address(url)
        self._tokenises_alike = True
        self._cache: ReportedCache | None = None
        self._is_followed = False

    @property
    def exactness(self) -> Exactness:
        """EXACT if prompts go as token ids and the server's events have reported its whole cache."""
        if self._session is None:
            return AWAY
        if not self._tokenises_alike:
            return OTHER_TOKENS
        return least(self._session.server.exactness, EXACT if self._cache is None else self._cache.exactness)

    def refusals(self, session: _VllmSession) -> Refusals:
        """Return what vLLM does not stream, and what a chat cannot have if the server takes nothing else."""
        return REFUSALS if session.server.form is not None else REFUSALS_OF_CHATS

    @property
    def kept_image_bytes(self) -> int:
        """Bytes of images that the server is believed to keep, unless it takes only chats, with all images."""
        takes_names = self._session is not None and self._session.server.form is not None
        return KEPT_IMAGE_BYTES if takes_names else 0

    async def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the blocks that the server holds, in our keys. Raises what published_events.follow() does."""
        server = self._session.server if self._session is not None else None
        if server is None or server.source is None:
            raise WorkerUnavailable(NOT_READY)
        self._is_followed = True
        self._cache = ReportedCache(server.context, server.naming)
        try:
            async with contextlib.aclosing(follow(server.source, self._cache)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._is_followed = False

    def generate(self, request: EngineRequest, sink: Sink, chat: Callable[[], ChatPrompt] | None = None) -> Stream:
        """Send *request* as token ids, or *chat* if the server takes no ids; the deltas of its samples go to *sink*.

        If the server no longer holds an image, the sink is asked for its pixels, and the request is sent once more.
        Raises WorkerUnavailable if the server is away. The sink fails with WorkerFailed if the server dies or sends
        nonsense, with UnsupportedParameter for what this wire cannot express, and with ImageTooLarge for too many
        pixels. If the server refuses, the error is RequestError, QueueFull or DeadlineExceeded.
        """
        session = self._session_for(request)
        if slots := slots_of(request):
            self.context.on_released(slots)
            raise InternalError("The images lie where this worker cannot read them.")
        if session.server.form is None and chat is not None:
            return PulledStream(self.url, sink, partial(self._read_chat, session, request, chat(), sink))
        return PulledStream(self.url, sink, lambda stream: self._read(session, request, sink, stream))

    async def _read(self, session: _VllmSession, request: EngineRequest, sink: Sink, stream: PulledStream) -> None:
        by_hash = [index for index, item in enumerate(request.media) if item.inline is None]
        answer = VllmAnswer(request)
        try:
            await self._read_tokens(session, request, answer, sink)
            return
        except WorkerFailed as error:
            # If vLLM lacks an image, it reports only that something went wrong.
            if not by_hash or answer.begun:
                raise
            logger.info("worker %s refused images by their hashes: %s", self.url, error.message)
        again = _with_pixels(request, await stream.pixels(by_hash))
        await self._read_tokens(session, again, VllmAnswer(request), sink)

    async def _read_chat(
        self, session: _VllmSession, request: EngineRequest, chat: ChatPrompt, sink: Sink, _: PulledStream
    ) -> None:
        answer = VllmAnswer(request)
        body = await _made(request, partial(chat_body, request, session.server.description.model, chat))
        async with contextlib.aclosing(self._deltas(session, CHAT, body, answer, request.traceparent)) as deltas:
            del body
            async for delta in deltas:
                self._compare(request, answer)
                sink.delta(delta)

    async def _read_tokens(self, session: _VllmSession, request: EngineRequest, answer: VllmAnswer, sink: Sink) -> None:
        server = session.server
        body = await _made(request, partial(generate_body, request, server.description.model, server.form))
        async with contextlib.aclosing(self._deltas(session, GENERATE, body, answer, request.traceparent)) as deltas:
            del body
            async for delta in deltas:
                sink.delta(delta)

    async def _deltas(
        self,
        session: _VllmSession,
        path: str,
        body: bytes,
        answer: VllmAnswer,
        traceparent: str | msgspec.UnsetType,
    ) -> AsyncGenerator[TokenDelta, None]:
        """POST *body* and yield what the server streams. If this is cancelled, the response is closed at once."""
        response = await session.http.stream(path, body, traceparent)
        del body
        try:
            if response.status != HTTPStatus.OK:
                logger.warning("worker %s refused a request with HTTP status %d", self.url, response.status)
                raise error_of(response.status, begun=False)
            async with contextlib.aclosing(events(response)) as received:
                async for event in received:
                    for delta in answer.take(event):
                        yield delta
            yield answer.close()
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerFailed(LOST) from error
        except RuntimeError as error:
            # aiohttp raises this when a connection is read that close() has closed.
            if not session.http.closed:
                raise
            raise WorkerFailed(LOST) from error
        finally:
            response.close()

    def _compare(self, request: EngineRequest, answer: VllmAnswer) -> None:
        """Note if the server made other token ids from a chat: then its blocks are not those of our prompts."""
        token_ids, answer.prompt_token_ids = answer.prompt_token_ids, None
        if token_ids is not None and token_ids != request.token_ids and self._tokenises_alike:
            self._tokenises_alike = False
            logger.warning("routing: the caches of worker %s are NONE: %s", self.url, OTHER_TOKENS.reason)
            self.context.on_change(self)

    async def _live(self) -> str:
        """Connect, then watch the server until it is lost or unhealthy; return why."""
        http = Http(self._address, self.context.credentials)
        try:
            server = await vllm_server.discover(http, self._address, self.context)
            self._enter(_VllmSession(http, server), server.description)
            while True:
                asked_at = time.monotonic()
                load = await vllm_server.load(http, self._address.rank, server.description.num_blocks)
                self._note_load(load, asked_at)
                await vllm_server.check_health(http)
                await asyncio.sleep(WATCH_EVERY_SECONDS)
        except SaccadeError as error:
            return error.message
        finally:
            self._leave()
            await http.close()

    def _enter(self, session: _VllmSession, description: Description) -> None:
        self._tokenises_alike = True
        if not self._is_followed:
            # A feed outlives a server that was only slow, and still reports what it covers.
            self._cache = None
        if session.server.chat_reason:
            logger.warning("worker %s: %s", self.url, session.server.chat_reason)
        super()._enter(session, description)


async def _made(request: EngineRequest, body: Callable[[], bytes]) -> bytes:
    """Return the result of *body* for *request*, computed in a thread if it would delay other tasks."""
    if not request.media and len(request.token_ids) < THREAD_FROM_TOKENS:
        return body()
    return await asyncio.to_thread(body)


def _with_pixels(request: EngineRequest, supplied: Sequence[MediaPixels]) -> EngineRequest:
    """Return *request* with the pixels of its images, and another id: the first one may still be in use."""
    pixels = {one.index: one.inline for one in supplied}
    media = tuple(
        msgspec.structs.replace(item, inline=pixels[index]) if index in pixels else item
        for index, item in enumerate(request.media)
    )
    return msgspec.structs.replace(request, media=media, request_id=f"{request.request_id}-again")
