"""Proposes tokens that answers may have next; a step computes them with the last token and keeps those that it draws.

Each token is drawn as it would be without proposals, with its own uniform number. A proposal is accepted if it equals
the token that is drawn in its place. So no answer, greedy or sampled, depends on proposals. Does not import torch.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary

from saccade.engine.core.sequence import Sequence
from saccade.engine.speculative_config import RUN_LENGTH, SpeculativeConfig

CREDIT, PAUSE_TOKENS = 8, 64
"""A step with proposals costs a sequence 1 of its credit, and an accepted token earns 2. Without credit it pauses."""


class Proposal(NamedTuple):
    """Tokens that may come next and, if the answer follows a grammar, the mask of the draw after each of them."""

    token_ids: tuple[int, ...]
    masks: tuple[bytes, ...] = ()


NO_PROPOSAL = Proposal(())


class Proposer(Protocol):
    """Proposes the tokens that may come next in a sequence."""

    def propose(self, sequence: Sequence, most: int) -> Ordered[int]:
        """Return at most *most* tokens that may follow the tokens of *sequence*."""


@dataclass(slots=True)
class _Account:
    """A sequence's *credit* for proposals. Without credit it gets no proposals until it has *resumes_at* tokens."""

    credit: int = CREDIT
    resumes_at: int = 0


class Speculation:
    """Takes up to *num_tokens* tokens from *proposer* for each step of a sequence, as long as proposals pay off.

    They pay off if at least one token is accepted for every two steps with proposals. A draft layer writes keys and
    values for *num_drafted* tokens after the step's own tokens.
    """

    def __init__(self, proposer: Proposer, num_tokens: int, num_drafted: int = 0) -> None:
        self._proposer = proposer
        self.num_tokens, self.num_drafted = num_tokens, num_drafted
        self._accounts: WeakKeyDictionary[Sequence, _Account] = WeakKeyDictionary()

    @classmethod
    def of_config(cls, config: SpeculativeConfig) -> Self:
        """Return the speculation that *config* requests."""
        if config.method == "mtp":
            return cls(OwnDrafts(), config.num_tokens, config.num_tokens - 1)
        return cls(PromptLookup(config.shortest, config.longest), config.num_tokens)

    def proposal(self, sequence: Sequence, room: int) -> Proposal | None:
        """Return at most *room* tokens for a decoding sequence's next step; None if there are none."""
        account = self._accounts.setdefault(sequence, _Account())
        if account.credit <= 0 and sequence.num_tokens >= account.resumes_at:
            account.credit = CREDIT
        sequence.speculates = account.credit > 0 and room > 0
        most = min(self.num_tokens, room, sequence.num_tokens_to_propose)
        if most < 1 or not sequence.speculates or sequence.num_steps_in_flight:
            return None
        token_ids = tuple(self._proposer.propose(sequence, most))
        if sequence.matcher is None:
            return Proposal(token_ids) if token_ids else None
        masks = tuple(sequence.matcher.masks_after(token_ids))
        return Proposal(token_ids[: len(masks)], masks) if masks else None

    def note(self, sequence: Sequence, num_accepted: int) -> None:
        """Account for a step with proposals for *sequence*."""
        account = self._accounts[sequence]
        account.credit = min(CREDIT, account.credit + 2 * num_accepted - 1)
        if account.credit <= 0:
            sequence.speculates, account.resumes_at = False, sequence.num_tokens + PAUSE_TOKENS


@dataclass(slots=True)
class _Index:
    """Where each run of tokens last ended, for runs that end before token *num_indexed*."""

    stops: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class PromptLookup:
    """Proposes the tokens that followed the previous occurrence of a sequence's last tokens, in prompt and answer.

    It looks for the last *longest* tokens, then for fewer, down to *shortest*.
    """

    def __init__(self, shortest: int = RUN_LENGTH, longest: int = RUN_LENGTH) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._indices: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, most: int) -> Ordered[int]:
        """Return the tokens that followed. If they are fewer than *most*, they repeat, as a repetitive answer does."""
        index, token_ids = self._indices.setdefault(sequence, _Index()), sequence.token_ids
        for stop in range(index.num_indexed, len(token_ids)):
            for length in self._lengths:
                index.stops[_run(token_ids, stop, length)] = stop
        index.num_indexed = len(token_ids)
        for length in self._lengths:
            last = index.stops.get(_run(token_ids, len(token_ids), length))
            if last is not None:
                return list(islice(cycle(token_ids[last : last + most]), most))
        return ()


class OwnDrafts:
    """Proposes the tokens that the model's own draft layer drafted along with the last token."""

    def propose(self, sequence: Sequence, most: int) -> Ordered[int]:
        """Return the draft, or nothing if the last step made none."""
        return sequence.draft[:most]


def _run(token_ids: Ordered[int], stop: int, length: int) -> tuple[int, ...]:
    return tuple(token_ids[max(0, stop - length) : stop])
