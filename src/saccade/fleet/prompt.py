"""A prompt, as far as the choice of a worker depends on it, and which workers can take it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from saccade.errors import ContextLengthExceeded, RequestError, UnsupportedParameter
from saccade.fleet.worker import Worker
from saccade.identity.blocks import MediaRun, block_key
from saccade.protocol.media import Span
from saccade.protocol.request import SamplingParams
from saccade.protocol.request_traits import RequestTraits

ONE_TOKEN = SamplingParams(max_tokens=1)
BEGINNING_TOKENS = 256
"""A prompt without images or a conversation is known by this many tokens of its beginning."""


@dataclass(frozen=True)
class Prompt:
    """What the choice of a worker depends on: token ids, the places of images, and the tenant's *salt*.

    The tokens of image i lie in spans[i]; *runs* are the same spans in prompt order. *reads_cache* is False if the
    worker must compute the whole prompt, whatever it holds. *sampling* draws *num_samples* answers. *needs_token_ids*
    is the error if only workers that take chats are left, or None if those can serve it. *needs_grammars* is the same
    for workers that cannot enforce grammars. The request waits among those of *tenant*, by *priority*. A tenant with
    *tenant_priority* 2 gets twice the share of one with 1. *conversation* is the same for all turns of a chat, and ""
    for a prompt that is no chat.
    """

    token_ids: list[int]
    runs: tuple[MediaRun, ...] = ()
    salt: bytes = b""
    spans: tuple[tuple[Span, ...], ...] = ()
    reads_cache: bool = True
    num_samples: int = 1
    needs_token_ids: RequestError | None = None
    sampling: SamplingParams = ONE_TOKEN
    needs_grammars: RequestError | None = None
    tenant: bytes = b""
    tenant_priority: int = 1
    priority: int = 0
    conversation: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of its longest answer."""
        return len(self.token_ids) + self.sampling.max_tokens

    def beginning_key(self, root: bytes) -> bytes:
        """Return a hash of *root* and of the first tokens: prompts that begin alike have the same one."""
        return block_key(root, self.token_ids[:BEGINNING_TOKENS], 0, ())

    @property
    def traits(self) -> RequestTraits:
        """The traits for which a worker may refuse the prompt."""
        return RequestTraits(
            len(self.token_ids), self.sampling, self.num_samples, bool(self.runs), self.salt, self.needs_token_ids
        )


def media_runs(images: Iterable[tuple[bytes, Sequence[Span]]]) -> tuple[MediaRun, ...]:
    """Return the runs of a prompt's *images*, each of which is (content hash, spans), in prompt order."""
    runs = []
    for content_hash, spans in images:
        offset = 0
        for span in spans:
            runs.append(MediaRun(span.start, span.length, content_hash, offset))
            offset += span.length
    return tuple(sorted(runs, key=lambda run: run.start))


def refusal(worker: Worker, prompt: Prompt) -> RequestError | None:
    """Return why *worker* cannot serve *prompt*, or None if it can."""
    description, sampling = worker.description, prompt.sampling
    if description is not None and prompt.num_tokens > description.max_model_len:
        return ContextLengthExceeded.of(
            description.max_model_len, len(prompt.token_ids), sampling.max_tokens, "messages"
        )
    return worker.refuses(prompt.traits) or _refusal_of_masks(worker, prompt)


def _refusal_of_masks(worker: Worker, prompt: Prompt) -> RequestError | None:
    takes_grammars = worker.description is not None and worker.description.takes_grammars
    takes_budgets = worker.description is not None and worker.description.takes_thinking_budgets
    if prompt.needs_grammars is not None and not takes_grammars:
        return prompt.needs_grammars
    if prompt.sampling.thinking_budget is not None and not takes_budgets:
        return UnsupportedParameter(
            "`thinking_token_budget` is not served by this model's workers; leave it out.", "thinking_token_budget"
        )
    return None
