"""Proposes tokens that answers may have next; a step computes them with the last token and keeps those that it draws.

Each token is drawn as it would be without proposals, with its own uniform number. A proposal is accepted if it equals
the token that is drawn in its place. So no answer, greedy or sampled, depends on proposals. Does not import torch.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary

from saccade.engine.core.proposal_prices import Prices, StepTimes
from saccade.engine.core.sequence import Sequence
from saccade.engine.speculative_config import RUN_LENGTH, SpeculativeConfig

SHARE, MOST_CREDIT = 0.02, 4.0
"""A token of an answer pays for this part of a step with wrong proposals, and many tokens for this many steps."""


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
    """A sequence's *credit* for proposals, in steps, when it has *num_tokens*. The last proposal costs *price*."""

    num_tokens: int
    credit: float = 0.0
    price: float = 0.0


class Speculation:
    """Takes up to *num_tokens* tokens from *proposer* for each step of a sequence, as long as proposals pay off.

    Each sequence has a credit. A token of its answer adds SHARE to it, an accepted one 1 more: the step that it saves.
    Proposals cost what they add to their step's time. They are as many as the credit covers. So wrong proposals
    lengthen answers by SHARE at most, and if verification costs more than it saves, there are fewer proposals.

    A draft layer writes keys and values for *num_drafted* tokens after the step's own tokens.
    """

    def __init__(self, proposer: Proposer, num_tokens: int, num_drafted: int = 0) -> None:
        self._proposer = proposer
        self.num_tokens, self.num_drafted = num_tokens, num_drafted
        self.times = StepTimes()
        self._accounts: WeakKeyDictionary[Sequence, _Account] = WeakKeyDictionary()

    @classmethod
    def of_config(cls, config: SpeculativeConfig) -> Self:
        """Return the speculation that *config* requests."""
        if config.method == "mtp":
            return cls(OwnDrafts(), config.num_tokens, config.num_tokens - 1)
        return cls(PromptLookup(config.shortest, config.longest), config.num_tokens)

    def proposal(self, sequence: Sequence, room: int, prices: Prices) -> Proposal | None:
        """Return at most *room* tokens for a decoding sequence's next step; None if there are none.

        *prices* are those of the step, which has the proposals of other sequences already.
        """
        account = self._accounts.setdefault(sequence, _Account(sequence.num_tokens))
        gained = SHARE * (sequence.num_tokens - account.num_tokens)
        account.num_tokens, account.credit = sequence.num_tokens, min(MOST_CREDIT, account.credit + gained)
        sequence.speculates = room > 0 and prices.of_one <= account.credit
        most = min(self.num_tokens, room, sequence.num_tokens_to_propose)
        if most < 1 or not sequence.speculates or sequence.num_steps_in_flight:
            return None
        token_ids = tuple(self._proposer.propose(sequence, most))
        token_ids = token_ids[: prices.num_covered(account.credit, len(token_ids))]
        masks: tuple[bytes, ...] = ()
        if sequence.matcher is not None:
            masks = tuple(sequence.matcher.masks_after(token_ids))
            token_ids = token_ids[: len(masks)]
        account.price = prices.of(len(token_ids))
        return Proposal(token_ids, masks) if token_ids else None

    def note(self, sequence: Sequence, num_accepted: int) -> None:
        """Account for a step with proposals for *sequence*."""
        account = self._accounts[sequence]
        account.credit = min(MOST_CREDIT, account.credit + num_accepted - account.price)


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
