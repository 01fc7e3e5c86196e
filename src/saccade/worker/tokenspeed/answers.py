"""Converts the engine's TokenDeltas to TokenSpeed's GenerateResponses: chunks, then one complete answer per sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade.errors import WorkerFailed
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest
from saccade.tokenization.detokenizer import Detokenizer, TextRules
from saccade.tokenization.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """The stop string *text*, which is complete after the first *num_tokens* tokens of the last push."""

    text: str
    num_tokens: int


class StopSearch:
    """Looks for stop strings in the text of one sample. *rules* lists them, and must have *shows_stop* set."""

    def __init__(self, tokenizer: Tokenizer, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(tokenizer, rules)
        self._stops = sorted(rules.stop, key=len, reverse=True)
        self._text = ""

    def push_tokens(self, token_ids: Sequence[int], is_last: bool) -> StopMatch | None:
        """Take more tokens, and return the stop string that ends the sample, if any.

        If several are complete at once, return the longest.
        """
        before = self._detokenizer.num_tokens
        self._text += self._detokenizer.push_tokens(token_ids)
        if is_last:
            self._text += self._detokenizer.finish_text()
        match = next((stop for stop in self._stops if self._text.endswith(stop)), "")
        self._text = self._text[-len(self._stops[0]) :]
        return StopMatch(match, self._detokenizer.num_tokens - before) if self._detokenizer.stop is not None else None


@dataclass
class _Sample:
    """One sample so far. *matched* is the stop id or the stop string that ended it."""

    search: StopSearch | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    begun: bool = False
    finish_reason: str | None = None
    matched: int | str | None = None


class ResponseBuilder:
    """Builds the responses to *request*, whose id on the wire is *name*.

    Call take_delta() with every delta. `num_open` counts the samples that have not ended. With *streams*, each delta
    that has tokens becomes a chunk, and the complete answer does not repeat the log probabilities. With *keeps_stop*,
    the stop id stays among the tokens. *search* returns a new search for stop strings.
    """

    def __init__(
        self,
        name: str,
        request: EngineRequest,
        *,
        streams: bool,
        keeps_stop: bool,
        search: Callable[[], StopSearch] | None = None,
    ) -> None:
        self.num_open = request.num_samples
        self._name = name
        self._streams = streams
        self._keeps_stop = keeps_stop
        self._with_logprobs = request.sampling.num_logprobs is not None
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._num_prompt_tokens = len(request.token_ids)
        self._samples = [_Sample(search() if search is not None else None) for _ in range(self.num_open)]

    def take_delta(self, delta: TokenDelta) -> Iterator[pb.GenerateResponse]:
        """Yield the responses to *delta*. Raises WorkerFailed if the engine gave the sample up."""
        sample = self._samples[delta.index]
        if sample.finish_reason is not None:
            # The engine sent it before it received the abort.
            return
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise WorkerFailed("The engine gave this request up.")
        token_ids, logprobs = self._extend(sample, delta)
        if self._streams and (token_ids or not sample.begun):
            # A gateway opens a choice at its first chunk, so the first one is sent even if it has no tokens.
            sample.begun = True
            yield self._chunk(delta.index, sample, token_ids, logprobs)
        if sample.finish_reason is not None:
            self.num_open -= 1
            yield self._complete(delta.index, sample)

    def has_ended(self, index: int) -> bool:
        return self._samples[index].finish_reason is not None

    def _extend(self, sample: _Sample, delta: TokenDelta) -> tuple[list[int], list[TokenLogprob]]:
        """Add *delta* to its sample; return the tokens and log probabilities to send."""
        token_ids = delta.token_ids
        stop_id = token_ids[-1:] if delta.finish_reason is FinishReason.STOP else []
        stop_id = stop_id if self._stop_token_ids.issuperset(stop_id) else []
        num_shown = len(token_ids) - len(stop_id)
        match = (
            sample.search.push_tokens(token_ids[:num_shown], delta.finish_reason is not None) if sample.search else None
        )
        if match is not None:
            token_ids, stop_id = token_ids[: match.num_tokens], []
            sample.finish_reason, sample.matched = FinishReason.STOP.value, match.text
        elif delta.finish_reason is not None:
            sample.finish_reason, sample.matched = delta.finish_reason.value, next(iter(stop_id), None)
        sample.num_tokens += len(token_ids)
        sample.num_cached_tokens += delta.num_cached_tokens
        shown_ids = token_ids[:num_shown] if stop_id and not self._keeps_stop else token_ids
        logprobs = delta.logprobs[: len(shown_ids)]
        sample.token_ids += shown_ids
        sample.logprobs += logprobs
        return shown_ids, logprobs

    def _chunk(
        self, index: int, sample: _Sample, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            request_id=self._name,
            chunk=pb.GenerateStreamChunk(
                token_ids=token_ids,
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=sample.num_tokens,
                cached_tokens=sample.num_cached_tokens,
                output_logprobs=self._logprobs(token_ids, logprobs),
                index=index,
            ),
        )

    def _complete(self, index: int, sample: _Sample) -> pb.GenerateResponse:
        complete = pb.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=sample.finish_reason,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sample.num_tokens,
            cached_tokens=sample.num_cached_tokens,
            output_logprobs=None if self._streams else self._logprobs(sample.token_ids, sample.logprobs),
            index=index,
        )
        if isinstance(sample.matched, int):
            complete.matched_token_id = sample.matched
        elif sample.matched is not None:
            complete.matched_stop_str = sample.matched
        return pb.GenerateResponse(request_id=self._name, complete=complete)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> pb.OutputLogProbs | None:
        if not self._with_logprobs or not token_ids:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in logprobs],
            token_ids=token_ids,
            top_logprobs=[pb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids) for entry in logprobs],
        )
