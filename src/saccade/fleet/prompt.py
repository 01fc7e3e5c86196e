"""A prompt, as far as the choice of a worker depends on it, and which workers can take it."""

import functools
import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from saccade.connectors.worker_state import Refusals, WorkerState
from saccade.errors import ContextLengthExceeded, RequestError
from saccade.identity.blocks import MediaRun, block_key
from saccade.protocol.media import Span
from saccade.protocol.needs import Need, needs_of
from saccade.protocol.request import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1)
BEGINNING_TOKENS = 256
"""A prompt without images or a conversation is known by this many tokens of its beginning."""


@dataclass(frozen=True)
class Prompt:
    """What the choice of a worker depends on: token ids, the places of images, and the tenant's *salt*.

    The tokens of image i lie in spans[i]; *runs* are the same spans in prompt order. *reads_cache* is False if the
    worker must compute the whole prompt, whatever it holds. *sampling* draws *num_samples* answers. *errors* has
    further needs, each with the error if only workers that lack it are left. The request waits among those of *tenant*,
    by *priority*. It goes to none of the workers with the urls *excluded*, which have failed. A tenant with
    *tenant_priority* 2 gets twice the share of one with 1. *conversation* is the same for all turns of a chat, and ""
    for a prompt that is no chat. One that *is_background* waits while any other prompt is waiting.
    """

    token_ids: list[int]
    runs: tuple[MediaRun, ...] = ()
    salt: bytes = b""
    spans: tuple[tuple[Span, ...], ...] = ()
    reads_cache: bool = True
    num_samples: int = 1
    sampling: SamplingParams = ONE_TOKEN
    errors: Refusals = field(default_factory=dict)
    tenant: bytes = b""
    tenant_priority: int = 1
    priority: int = 0
    excluded: Set[str] = frozenset()
    conversation: bytes = b""
    is_background: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of its longest answer."""
        return len(self.token_ids) + self.sampling.max_tokens

    def beginning_key(self, root: bytes) -> bytes:
        """Return a hash of *root* and of the first tokens: prompts that begin alike have the same one."""
        return block_key(root, self.token_ids[:BEGINNING_TOKENS], 0, ())

    @cached_property
    def needs(self) -> Need:
        """What the request needs of a worker, besides room for its tokens."""
        needs = needs_of(self.sampling, self.num_samples, has_images=bool(self.runs))
        return functools.reduce(operator.or_, self.errors, needs)


def media_runs(images: Iterable[tuple[bytes, Sequence[Span]]]) -> tuple[MediaRun, ...]:
    """Return the runs of a prompt's *images*, each of which is (content hash, spans), in prompt order."""
    runs = []
    for content_hash, spans in images:
        offset = 0
        for span in spans:
            runs.append(MediaRun(span.start, span.length, content_hash, offset))
            offset += span.length
    return tuple(sorted(runs, key=lambda run: run.start))


def refusal(state: WorkerState, prompt: Prompt) -> RequestError | None:
    """Return why a worker with *state* cannot serve *prompt*, or None if it can."""
    description = state.description
    if description is not None and prompt.num_tokens > description.max_model_len:
        return ContextLengthExceeded.of(
            description.max_model_len, len(prompt.token_ids), prompt.sampling.max_tokens, "messages"
        )
    return state.refusal(prompt.needs, prompt.salt, prompt.errors)
