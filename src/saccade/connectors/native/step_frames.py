"""Reads the frames of a worker's stream. It counts their parts before it makes objects of them.

A frame of 24 MiB may have eight million deltas without a token, and making objects of them takes 20 s and 2 GB. What
a frame may hold follows from the requests that the stream carries, so no honest worker reaches a limit.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from saccade.protocol.engine_load import Load
from saccade.protocol.output import PixelsWanted, StepFrame, TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.transport.message_pack import is_short_array, num_items
from saccade.transport.wire import MAX_MESSAGE_BYTES

MAX_FRAME_BYTES: Final = 4 << 20
"""Without log probabilities. A delta takes about 100 bytes, so a step of 40,000 samples fits."""

DELTAS_OF_A_SAMPLE: Final = 2
"""In one frame. A step adds one delta to each sample; a sample that has left may have one as well."""

SPARE: Final = 1024
"""Deltas, questions and names of slots that no request explains; faults of a worker that harm nobody."""

USUAL_BYTES, USUAL_BYTES_OF_A_SAMPLE = 4096, 256
"""A frame of fewer bytes is decoded at once: it cannot make more objects than one turn of the event loop has room for.
"""

DELTA_BYTES: Final = 4096
"""A delta without log probabilities: an id, the tokens of one step, or the sentence of an error."""

LOAD_BYTES: Final = 4096
"""Load is 30 names and numbers, about 700 bytes."""

TOO_MANY: Final = "more deltas, questions or slots than its requests have"


class Excess(msgspec.ValidationError):
    """A frame holds more than the requests of its stream explain. It is UNREADABLE, so it ends the stream."""


class _Whole(msgspec.Struct, array_like=True):
    """A StepFrame that is not decoded yet."""

    deltas: list[msgspec.Raw]
    slot_names: msgspec.Raw = msgspec.Raw(b"\x90")
    load: msgspec.Raw = msgspec.Raw(b"\xc0")
    pixels_wanted: msgspec.Raw = msgspec.Raw(b"\x90")


class _Name(msgspec.Struct, array_like=True):
    """The beginning of a TokenDelta."""

    request_id: str


def logprob_bytes(request: EngineRequest) -> int:
    """Return the most bytes that the log probabilities of one sample of *request* take."""
    sampling = request.sampling
    num_bytes = 0
    for num_top, num_tokens in (
        (sampling.num_logprobs, sampling.max_tokens),
        (sampling.num_prompt_logprobs, len(request.token_ids)),
    ):
        if num_top is not None:
            # A number takes 9 bytes at most, an id 5; some engines add the drawn token to the most likely ones.
            num_bytes += num_tokens * (32 + 14 * (num_top + 1))
    return num_bytes


class StepFrames:
    """Decodes the frames of one stream, whose requests enter() and leave().

    *delta_bytes* returns the most bytes that a delta of a request may have, or 0 for a request that is not open.
    """

    def __init__(self, delta_bytes: Callable[[str], int]) -> None:
        self._delta_bytes = delta_bytes
        self._num_samples = self._most_samples = 0
        self._logprob_bytes = self._most_logprob_bytes = 0
        self._num_lent = 0
        self._num_spare = SPARE
        self._frames = msgspec.msgpack.Decoder(StepFrame)
        self._wholes = msgspec.msgpack.Decoder(_Whole)
        self._names = msgspec.msgpack.Decoder(_Name)
        self._deltas = msgspec.msgpack.Decoder(TokenDelta)
        self._loads = msgspec.msgpack.Decoder(Load | None)
        self._questions = msgspec.msgpack.Decoder(list[PixelsWanted])
        self._slot_names = msgspec.msgpack.Decoder(list[str])

    @property
    def max_bytes(self) -> int:
        """The most bytes that a frame may have."""
        return min(MAX_MESSAGE_BYTES, MAX_FRAME_BYTES + self._most_logprob_bytes)

    def enter(self, request: EngineRequest) -> None:
        """Note that the worker gets *request*."""
        self._num_samples += request.num_samples
        self._most_samples = max(self._most_samples, self._num_samples)
        self._logprob_bytes += request.num_samples * logprob_bytes(request)
        self._most_logprob_bytes = max(self._most_logprob_bytes, self._logprob_bytes)

    def leave(self, request: EngineRequest, num_left: int) -> None:
        """Note that *request* is not open any more; *num_left* more deltas of it may be on the way."""
        self._num_samples -= request.num_samples
        self._logprob_bytes -= request.num_samples * logprob_bytes(request)
        self._num_spare += num_left

    def lend(self, num_slots: int) -> None:
        """Note that the worker may read *num_slots* more slots."""
        self._num_lent += num_slots

    def take_back(self, num_slots: int) -> None:
        """Note that the worker has released *num_slots* slots."""
        self._num_lent -= num_slots

    def spend(self, num_strays: int) -> None:
        """Count deltas, questions and slots that no request explains. Raises Excess if there are too many."""
        self._num_spare -= num_strays
        if self._num_spare < 0:
            raise Excess(TOO_MANY)

    def decode(self, payload: bytes) -> StepFrame:
        """Return the frame in *payload*. Raises UNREADABLE, such as Excess."""
        if not is_short_array(payload):
            raise msgspec.ValidationError("a frame is an array of a few parts")
        if num_items(payload, 1) > self._most_deltas:
            raise Excess(TOO_MANY)
        if len(payload) <= USUAL_BYTES + USUAL_BYTES_OF_A_SAMPLE * self._most_samples:
            return self._frames.decode(payload)
        return self._decode_by_parts(payload)

    @property
    def _most_deltas(self) -> int:
        return SPARE + DELTAS_OF_A_SAMPLE * self._most_samples

    def _decode_by_parts(self, payload: bytes) -> StepFrame:
        if len(payload) > self.max_bytes:
            raise Excess("a frame is too long")
        whole = self._wholes.decode(payload)
        if num_items(memoryview(whole.slot_names)) > SPARE + self._num_lent:
            raise Excess(TOO_MANY)
        if num_items(memoryview(whole.pixels_wanted)) > self._most_deltas or memoryview(whole.load).nbytes > LOAD_BYTES:
            raise Excess(TOO_MANY)
        return StepFrame(
            [delta for raw in whole.deltas if (delta := self._delta(raw)) is not None],
            self._slot_names.decode(whole.slot_names),
            self._loads.decode(whole.load),
            self._questions.decode(whole.pixels_wanted),
        )

    def _delta(self, raw: msgspec.Raw) -> TokenDelta | None:
        """Return the delta in *raw*, or None if its request is not open; then it may have any size."""
        most = self._delta_bytes(self._names.decode(raw).request_id)
        if not most:
            self.spend(1)
            return None
        if memoryview(raw).nbytes > most:
            raise Excess("a delta is longer than its request explains")
        return self._deltas.decode(raw)
