"""Requests that two workers serve: a prefill worker computes the prompt, a decode worker the answer.

Both legs are sent at once. The decode worker reserves room, then gets the prompt's KV state directly from the prefill
worker, under a key that the gateway gives to both. All tokens come from the decode worker. Pixels go to the prefill
worker alone; the decode worker may ask for them later if it has to compute the prompt again.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from saccade.connectors.sink import Legs, PrefillSink, Sink, Stream
from saccade.errors import PeerFailed, SaccadeError, WorkerFailed
from saccade.fleet.worker import Worker
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.kv_transfer import ReceiveKv, SendKv, new_key
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest

SEED_BITS = 63


class Pair:
    """The *workers* of a request, for prefill and for decode; *failed_worker* is the one to blame if it fails.

    *on_prefilled* is called once the prefill worker has computed the prompt, *on_first_token* at the first token.
    """

    def __init__(
        self, workers: tuple[Worker, Worker], on_prefilled: Callable[[], None], on_first_token: Callable[[], None]
    ) -> None:
        self._suffix = f"-{secrets.token_hex(4)}"
        self.workers = workers
        self.failed_worker = workers[1]
        self.on_prefilled = on_prefilled
        self.on_first_token = on_first_token

    @property
    def url(self) -> str:
        """Both urls, for the log."""
        return " + ".join(worker.url for worker in self.workers)

    def generate(self, request: EngineRequest, sink: Sink, chat: Callable[[], ChatPrompt]) -> Stream:
        """Send both legs of *request*, as Worker.generate() does; the decode leg's deltas go to *sink*."""
        prefill, decode = self.workers
        # If the prefill worker fails, a retry may use the same decode worker. Its late messages about this attempt must
        # not end the next one, so every attempt has its own id.
        request = msgspec.structs.replace(request, request_id=request.request_id + self._suffix)
        first, second = legs_of(
            request, (prefill.state.description and prefill.state.description.kv_transfer_address) or ""
        )
        stream = _PairStream(self, sink, request.num_samples)
        stream.send(prefill, first, _PrefillSink(stream), chat)
        stream.send(decode, second, stream, chat)
        return stream


class _PairStream(Legs):
    """The legs of a request at *pair*."""

    def __init__(self, pair: Pair, sink: Sink, num_samples: int) -> None:
        super().__init__(sink)
        self.pair = pair
        self.num_prefilling = num_samples
        self.prefill_error: BaseException | None = None

    def send(self, worker: Worker, leg: EngineRequest, sink: Sink, chat: Callable[[], ChatPrompt]) -> None:
        """Send *leg*, or fail its *sink*."""
        try:
            self.streams.append(worker.generate(leg, sink, chat))
        except SaccadeError as error:
            sink.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail the request with a leg's *error*, and record which worker is to blame."""
        prefill, decode = self.pair.workers
        self.pair.failed_worker = prefill if self._is_prefill_to_blame(error) else decode
        if isinstance(error, PeerFailed):
            error = WorkerFailed(error.message)
        self.sink.fail(error)

    def _is_prefill_to_blame(self, error: BaseException) -> bool:
        own = self.prefill_error
        if own is error or not isinstance(error, PeerFailed):
            return own is not None and not isinstance(own, PeerFailed)
        return True


@dataclass(frozen=True)
class _PrefillSink(PrefillSink):
    """Ends the prefill booking once the prompt is computed."""

    legs: _PairStream

    def delta(self, delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            self.legs.num_prefilling -= 1
            if not self.legs.num_prefilling:
                self.legs.pair.on_prefilled()

    def fail(self, error: BaseException) -> None:
        if self.legs.num_prefilling:
            self.legs.prefill_error = error
            super().fail(error)


def legs_of(request: EngineRequest, source: str) -> tuple[EngineRequest, EngineRequest]:
    """Return the prefill leg and the decode leg of *request*; the KV state comes from *source*, host:port.

    The prefill leg draws one token. The decode leg has the images' grids, hashes and spans but no pixels. Both legs
    share one random seed.
    """
    key = new_key()
    seed = secrets.randbits(SEED_BITS) if request.sampling.seed is None else request.sampling.seed
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    short = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(1, sampling.min_tokens))
    media = tuple(msgspec.structs.replace(item, slot=None, inline=None) for item in request.media)
    return (
        msgspec.structs.replace(request, sampling=short, kv_transfer=SendKv(key)),
        msgspec.structs.replace(request, sampling=sampling, media=media, kv_transfer=ReceiveKv(key, source)),
    )
