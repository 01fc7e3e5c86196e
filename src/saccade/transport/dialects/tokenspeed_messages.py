"""EngineRequest to TokenSpeed's GenerateRequest, and its GenerateResponses to TokenDeltas.

The contract is tokenspeed_scheduler.proto of smg-grpc-proto, and what smg_grpc_servicer/tokenspeed/servicer.py makes
of it.
"""

import math
import os
from collections.abc import Collection, Sequence

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade.errors import (
    DeadlineExceeded,
    InternalError,
    QueueFull,
    RequestError,
    SaccadeError,
    UnsupportedParameter,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.identity.content import content_hash
from saccade.protocol.description import Description
from saccade.protocol.media import BYTES_PER_VALUE, MediaItem
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.transport.dialects.shared_memory_links import OFFSET

PATCHES_PER_IMAGE = "patches_per_image"
NO_LIMIT = -1
FINISH_REASONS = {"stop": FinishReason.STOP, "tool_calls": FinishReason.STOP, "length": FinishReason.LENGTH}
REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
)
LOST = "The worker stopped while it answered; the request can be sent again."


def generate_request(
    request: EngineRequest, payloads: Sequence[str | bytes], grid_name: str | None, eos_token_ids: Collection[int]
) -> pb.GenerateRequest:
    """Return *request* as TokenSpeed's message.

    *payloads* are the pixels of each picture, or the name of the file in shared memory where they lie. *grid_name* is
    what the model calls a picture's grid; *eos_token_ids* are those that the worker stops at by itself.
    """
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.token_ids),
        sampling_params=_sampling_params(request.sampling, eos_token_ids),
        return_logprob=request.sampling.num_logprobs is not None,
        top_logprobs_num=request.sampling.num_logprobs or 0,
        stream=True,
    )
    for item, payload in zip(request.media, payloads, strict=True):
        # Filled in place: a message that is copied into another copies its pixels too.
        filled = message.mm_inputs.items.add()
        _fill(filled, item, payload)
        # The wire has no salt. Folded into the hash it separates tenants from the first picture on.
        filled.content_hash = content_hash(item.content_hash, request.salt) if request.salt else item.content_hash
        filled.placeholder_token_id = request.token_ids[item.spans[0].start]
        if grid_name is not None:
            _fill_int64(filled.model_specific_tensors[grid_name], (1, len(item.grid)), item.grid)
    return message


def _sampling_params(sampling: SamplingParams, eos_token_ids: Collection[int]) -> pb.SamplingParams:
    """Everything is said, so that no default of the worker's applies. The id that ended an answer is asked for too.

    Our stop_token_ids hold the end-of-sequence ids unless they are to be ignored: then the worker's must be, too.
    """
    stops = frozenset(sampling.stop_token_ids)
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or NO_LIMIT,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=not stops or (bool(eos_token_ids) and stops.isdisjoint(eos_token_ids)),
        no_stop_trim=True,
        n=1,
        sampling_seed=None if sampling.seed is None else sampling.seed % (1 << 64),
    )


def _fill(message: pb.MultimodalItem, item: MediaItem, payload: str | bytes) -> None:
    message.modality = common_pb2.Modality.Value(item.modality.upper())
    tensor = message.encoder_input
    tensor.dtype = item.pixel_dtype
    tensor.shape.extend(item.pixel_shape)
    if isinstance(payload, bytes):
        tensor.inline = payload
    else:
        tensor.shm.name = payload
        tensor.shm.offset = OFFSET
        tensor.shm.nbytes = math.prod(item.pixel_shape) * BYTES_PER_VALUE[item.pixel_dtype]
        tensor.shm.owner_id = f"saccade:{os.getpid()}"
    for span in item.spans:
        message.placeholders.add(offset=span.start, length=span.length)
    _fill_int64(message.model_specific_tensors[PATCHES_PER_IMAGE], (1,), (math.prod(item.grid),))


def _fill_int64(tensor: pb.TensorData, shape: tuple[int, ...], values: tuple[int, ...]) -> None:
    tensor.dtype = "int64"
    tensor.shape.extend(shape)
    tensor.inline = b"".join(value.to_bytes(8, "little", signed=True) for value in values)


def check_parameters(request: EngineRequest) -> None:
    """Raise UnsupportedParameter for what this wire lacks; of several samples, it cannot abort one by itself."""
    asked = {
        "n": request.num_samples > 1,
        "allowed_token_ids": bool(request.sampling.allowed_token_ids),
        "prompt_logprobs": request.sampling.num_prompt_logprobs is not None,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedParameter(f"`{name}` is not served by this model's workers; leave it out.", name)


def check_pixels(request: EngineRequest, description: Description) -> None:
    """Raise InternalError for pixels in a form that the worker does not take, or none at all."""
    for item in request.media:
        if item.pixel_dtype != description.pixel_dtype:
            raise InternalError(f"The pictures are {item.pixel_dtype}; this worker takes {description.pixel_dtype}.")
        if item.slot is None and item.inline is None:
            raise InternalError("A picture came without pixels, which this worker does not keep.")


class Answer:
    """One answer as it arrives. take() every message, then close() if the stream ends; `finished` after the last."""

    def __init__(self, request: EngineRequest) -> None:
        self.finished = False
        """Whether the worker has said its last word."""

        self._request_id = request.request_id
        self._with_logprobs = request.sampling.num_logprobs is not None
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._num_tokens = 0
        self._newest: int | None = None
        self._last: TokenDelta | None = None

    @property
    def begun(self) -> bool:
        """Whether a token has come."""
        return self._num_tokens > 0

    def take(self, response: pb.GenerateResponse) -> TokenDelta | None:
        """Return what *response* adds, None for nothing. Raises WorkerFailed where it makes no sense."""
        kind = response.WhichOneof("response")
        if kind is None or (message := getattr(response, kind)).index != 0:
            raise WorkerFailed("The worker sent an answer that was not asked for.")
        if kind == "complete":
            self.finished = True
            return self._last or self._complete(message)
        # A worker that goes on after a stop id, as some do when they ignore end-of-sequence ids, is not listened to.
        return self._last or self._chunk(message)

    def close(self) -> TokenDelta:
        """Return the last delta if it is known already. Raises WorkerFailed: the stream ended without one."""
        if self._last is None:
            raise WorkerFailed("The worker ended the answer without saying why.")
        return self._last

    def _chunk(self, chunk: pb.GenerateStreamChunk) -> TokenDelta | None:
        token_ids = list(chunk.token_ids)
        if not token_ids:
            return None
        end = next((index for index, token_id in enumerate(token_ids, 1) if token_id in self._stop_token_ids), None)
        logprobs = self._logprobs(chunk.output_logprobs, token_ids)[:end]
        delta = self._delta(token_ids[:end], None if end is None else FinishReason.STOP, chunk.cached_tokens, logprobs)
        if end is None:
            return delta
        # The worker's own last message follows at once; leaving before it would be an abort to the worker.
        self._last = delta
        return None

    def _complete(self, complete: pb.GenerateComplete) -> TokenDelta:
        reason = FINISH_REASONS.get(complete.finish_reason)
        if reason is None:
            raise WorkerFailed("The worker gave this request up.")
        # output_ids is the whole answer, or no more than the last chunk again.
        token_ids = list(complete.output_ids[self._num_tokens :])
        logprobs = self._logprobs(complete.output_logprobs, token_ids)
        matched = complete.matched_token_id if complete.WhichOneof("matched_stop") == "matched_token_id" else None
        if matched is not None and matched != (token_ids[-1] if token_ids else self._newest):
            token_ids.append(matched)
        return self._delta(token_ids, reason, complete.cached_tokens, logprobs)

    def _logprobs(self, message: pb.OutputLogProbs, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """Return those of *token_ids*, the newest that *message* tells of. Raises UnsupportedParameter for none.

        A worker that was started without them leaves them out, and so it does for a stop id that it trims.
        """
        if not self._with_logprobs or not token_ids:
            return []
        first = len(message.token_logprobs) - len(token_ids)
        if first < 0:
            raise UnsupportedParameter(
                "This model's workers give no log probabilities; leave out `logprobs`.", "logprobs"
            )
        tops = message.top_logprobs[first:] or [pb.TopLogProbs()] * len(token_ids)
        return [_logprob(*given) for given in zip(token_ids, message.token_logprobs[first:], tops, strict=False)]

    def _delta(
        self, token_ids: list[int], reason: FinishReason | None, num_cached_tokens: int, logprobs: list[TokenLogprob]
    ) -> TokenDelta:
        first = self._num_tokens == 0
        self._num_tokens += len(token_ids)
        self._newest = token_ids[-1] if token_ids else self._newest
        num_cached_tokens = num_cached_tokens if first else 0
        return TokenDelta(self._request_id, token_ids, reason, num_cached_tokens, logprobs=logprobs)


def _logprob(token_id: int, logprob: float, top: pb.TopLogProbs) -> TokenLogprob:
    """Return the log probability of a token. The wire has no rank: one that is not among the top is put after them."""
    top_ids = list(top.token_ids)
    rank = top_ids.index(token_id) + 1 if token_id in top_ids else len(top_ids) + 1
    return TokenLogprob(logprob, rank, top_ids, list(top.values))


def error_of(status: grpc.StatusCode, *, begun: bool) -> SaccadeError:
    """Return what a gRPC status means for the client; *begun* when a part of the answer had come.

    The statuses are those that the servicer makes of its engine's (smg_grpc_servicer/engine_status.py); its words
    are the engine's and are not shown.
    """
    if status in REFUSED:
        return RequestError("The worker does not accept this request as it is.")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFull("The worker has too much work; try again shortly.")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("The worker took longer than its limit.")
    if status is grpc.StatusCode.UNAVAILABLE and not begun:
        return WorkerUnavailable("The worker is not ready; try again shortly.")
    return WorkerFailed(LOST)
