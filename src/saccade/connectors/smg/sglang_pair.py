"""A prefill and a decode worker of SGLang as one worker: each request goes to both, as two legs that meet.

The prefill worker gets the prompt with its images, the decode worker only the prompt's ids. The KV cache passes between
them, at the prefill worker's bootstrap server. The answer is the decode worker's. Both refuse images of models whose
positions follow from grids (sglang.py), so the decode leg lacks nothing.
"""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from saccade.connectors.context import ClientContext
from saccade.connectors.session import NOT_READY, slots_of
from saccade.connectors.sink import Legs, PrefillSink, Sink, Stream
from saccade.connectors.smg.sglang import DECODE, PREFILL, SglangClient
from saccade.connectors.smg.sglang_address import SCHEME, SglangAddress
from saccade.connectors.worker_state import WorkerState
from saccade.errors import StartupError, WorkerUnavailable
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.request import EngineRequest

MAX_ROOM = (1 << 31) - 1
DIFFERENT = "its prefill and decode worker serve different models"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Where the two legs of a request meet: at the prefill worker's bootstrap server, in a numbered room.

    *room* is in [1, MAX_ROOM]; modulo the number of data-parallel ranks, it is the prefill rank.
    """

    host: str
    port: int
    room: int

    def tell(self, message: pb.GenerateRequest) -> None:
        """Write the meeting into a leg's *message*."""
        meeting = message.disaggregated_params
        meeting.bootstrap_host, meeting.bootstrap_port, meeting.bootstrap_room = self.host, self.port, self.room


class SglangPair:
    """The workers at *url*, `sglang://DECODE?prefill=PREFILL`, with the interface of fleet.worker.Worker.

    If a leg fails before the first delta, the request fails. When the request ends, legs that still run are aborted.
    """

    def __init__(self, url: str, context: ClientContext) -> None:
        address = SglangAddress.read(url)
        if not address.prefill:
            raise StartupError(f"{url!r} names no prefill worker.")
        self.url = url
        self._context = context
        of_workers = dataclasses.replace(context, on_change=self._changed, on_load=self._reported_load)
        self._prefill = SglangClient(SCHEME + address.prefill, of_workers, PREFILL)
        self._decode = SglangClient(SCHEME + address.target, of_workers, DECODE)
        self._bootstrap = address.bootstrap
        self._noted: tuple[bool, bytes | None] = (False, None)

    @property
    def state(self) -> WorkerState:
        """The prefill worker's, which computes the prompts and keeps them, with what the decode worker adds."""
        prefill, decode = self._prefill.state, self._decode.state
        load = None
        if prefill.load is not None and decode.load is not None:
            num_waiting = prefill.load.num_waiting + decode.load.num_waiting
            load = msgspec.structs.replace(decode.load, num_waiting=num_waiting)
        losses = (f"{one.url}: {one.loss}" for one in (self._prefill, self._decode) if one.loss)
        return dataclasses.replace(
            prefill,
            ready=self.ready,
            loss=next(losses, DIFFERENT if self._differ() else ""),
            load=load,
            # Both were as busy as the load says between these times.
            load_times=(
                min(prefill.load_times[0], decode.load_times[0]),
                max(prefill.load_times[1], decode.load_times[1]),
            ),
            refusals={**decode.refusals, **prefill.refusals},
        )

    @property
    def ready(self) -> bool:
        """Whether both workers are ready, and serve the same files."""
        return self._prefill.ready and self._decode.ready and self._agree()

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        await asyncio.gather(self._prefill.start(), self._decode.start())

    async def close(self) -> None:
        """End every call; open requests raise WorkerFailed."""
        await asyncio.gather(self._prefill.close(), self._decode.close())

    def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the blocks that the prefill worker stores and drops."""
        return self._prefill.kv_events(blocks=blocks)

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Return False: this wire has no such command."""
        return False

    def generate(self, request: EngineRequest, sink: Sink, chat: object = None) -> Stream:
        """Send both legs of *request*; the decode worker's deltas go to *sink*.

        Raises WorkerUnavailable if a worker is not ready. The sink fails as that of SglangClient.generate(): for either
        leg before the first delta, then for the decode leg.
        """
        if not self.ready:
            self._context.on_released(slots_of(request))
            raise WorkerUnavailable(NOT_READY)
        port = self._bootstrap or self._prefill.bootstrap_port
        meeting = Meeting(self._prefill.host, port, 1 + secrets.randbelow(MAX_ROOM))
        legs = Legs(sink)
        decode_leg = msgspec.structs.replace(request, media=())
        legs.streams.append(self._prefill.generate(request, PrefillSink(legs), complete=meeting.tell))
        legs.streams.append(self._decode.generate(decode_leg, legs, complete=meeting.tell))
        return legs

    def _agree(self) -> bool:
        prefill, decode = self._prefill.description, self._decode.description
        return prefill is not None and decode is not None and prefill.files == decode.files

    def _differ(self) -> bool:
        return self._prefill.ready and self._decode.ready and not self._agree()

    def _reported_load(self, _: object) -> None:
        self._context.on_load(self)

    def _changed(self, _: object) -> None:
        """Report that the pair has become ready or is no longer, or now serves one tenant."""
        if self._differ():
            logger.error("worker %s: %s; it gets no work", self.url, DIFFERENT)
        now = self.ready, self._prefill.salt
        if now != self._noted:
            self._noted = now
            self._context.on_change(self)
