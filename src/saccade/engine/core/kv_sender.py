"""The prefill legs of an engine: prompts whose state goes to a decode worker.

A prefill leg is computed like any request, up to the first token of each sample. Its sample 0 then keeps its blocks and
its row until the decode worker has received the state, or the transfer has failed. The state goes in pieces, which
steps copy out of the caches, at most STEP_BYTES in one step. A piece has full blocks, or the block behind them alone,
or the recurrent states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.engine.core.kv_legs import check_key
from saccade.engine.core.requests import Requests
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import KvSend
from saccade.errors import InvalidValue, PeerFailed
from saccade.protocol.kv_transfer import FirstToken, KvForm, Piece, Prefilled, SendKv
from saccade.protocol.output import FinishReason, TokenLogprob
from saccade.protocol.request import EngineRequest
from saccade.transport.kv_transfer.events import Delivered, Event, PieceTaken, TransferEnded, Wanted
from saccade.transport.kv_transfer.service import MAX_PIECE_BYTES, KvTransfers

STEP_BYTES = 2 * MAX_PIECE_BYTES
"""State that one step copies; requests that are computed in the step wait for the copy."""

NUM_UNTAKEN = 2
"""Pieces of a transfer on their way at a time: one is used while the other travels."""


class _Answer(NamedTuple):
    """The first token of sample 0, which is told when the state is delivered."""

    logprob: TokenLogprob | None
    reason: FinishReason
    drawn_at: float


@dataclass(slots=True, eq=False)
class _Leg:
    """One prefill leg. *next_block* is None until the decode worker has asked; *first* has the tokens drawn so far."""

    key: bytes
    sequence: Sequence
    num_samples: int
    first: dict[int, FirstToken] = field(default_factory=dict)
    answer: _Answer | None = None
    next_block: int | None = None
    has_sent_state: bool = False
    num_untaken: int = 0


class KvSender:
    """The prefill legs by the keys of their transfers."""

    def __init__(self, transfers: KvTransfers, form: KvForm, scheduler: Scheduler, requests: Requests) -> None:
        self.transfers = transfers
        self._form = form
        self._scheduler = scheduler
        self._requests = requests
        self._legs: dict[bytes, _Leg] = {}
        self._planned: list[tuple[_Leg, Piece]] = []

    @property
    def has_work(self) -> bool:
        return self.transfers.has_events or any(self._next(leg) is not None for leg in self._legs.values())

    @property
    def wake_fds(self) -> tuple[int, ...]:
        return (self.transfers.wake_fd,)

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValue for a decode leg, and for a prefill leg that cannot be one."""
        wanted = request.kv_transfer
        if wanted is None:
            return
        if not isinstance(wanted, SendKv):
            raise InvalidValue("A prefill worker serves no decode legs.", "kv_transfer")
        check_key(wanted.key, self._legs)
        if request.sampling.max_tokens != 1:
            raise InvalidValue("A prefill leg draws one token: max_tokens must be 1.", "max_tokens")
        manager, rows = self._scheduler.block_manager, self._scheduler.budgets.max_num_seqs
        blocks = manager.paged_blocks.num_blocks
        # Those of the prompt, and for one of its other samples at a time.
        num_blocks = -(-len(request.token_ids) // manager.block_size) + manager.num_sample_blocks(
            len(request.token_ids)
        )
        if request.num_samples > 1 and (request.num_samples > rows or num_blocks > blocks):
            raise InvalidValue(
                f"n is {request.num_samples}, but this prefill worker runs at most {rows} sequences over {blocks} "
                "blocks, and begins no prompt without room for all samples.",
                "n",
            )

    def open(self, sequence: Sequence) -> None:
        """Begin the leg of *sequence*, sample 0 of its request, if it is one."""
        if isinstance(wanted := sequence.request.kv_transfer, SendKv):
            self._legs[wanted.key] = _Leg(wanted.key, sequence, sequence.request.num_samples)
            self.transfers.offer(wanted.key)

    def poll(self) -> None:
        for event in self.transfers.events():
            if (leg := self._legs.get(event.key)) is not None:
                self._take(leg, event)

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Note the first token of a sample; return whether the sample ends only when its state is delivered."""
        kv_transfer = sequence.request.kv_transfer
        leg = self._legs.get(kv_transfer.key) if isinstance(kv_transfer, SendKv) else None
        if leg is None or reason is None:
            return False
        leg.first[sequence.index] = FirstToken(sequence.token_ids[-1], logprob)
        if sequence is leg.sequence:
            leg.answer = _Answer(logprob, reason, now)
            self._scheduler.keep(sequence)
            self.transfers.begun(leg.key)
        if len(leg.first) == leg.num_samples:
            first = [leg.first[index] for index in range(leg.num_samples)]
            computed = leg.sequence
            message = Prefilled(first, computed.num_cached_tokens or 0, computed.prompt_logprobs or [])
            self.transfers.prefilled(leg.key, message)
        return sequence is leg.sequence

    def _take(self, leg: _Leg, event: Event) -> None:
        match event:
            case Wanted(_, first_block):
                leg.next_block = max(0, first_block)
            case PieceTaken():
                leg.num_untaken -= 1
            case Delivered() if leg.answer is not None:
                del self._legs[leg.key]
                self._requests.answer(leg.sequence, *leg.answer)
            case Delivered():
                self._requests.fail(leg.sequence, PeerFailed("The decode worker ended the transfer too early."))
            case TransferEnded():
                del self._legs[leg.key]
                self._requests.fail(leg.sequence, event.error)

    def ended(self, sequence: Sequence) -> None:
        """Withdraw the transfer of a sequence that has ended."""
        kv_transfer = sequence.request.kv_transfer
        if isinstance(kv_transfer, SendKv) and (leg := self._legs.get(kv_transfer.key)) and leg.sequence is sequence:
            del self._legs[leg.key]
            self.transfers.withdraw(leg.key)

    def plan(self, schedule: Schedule) -> None:
        """Add to the step the pieces that it copies, those of the oldest leg first."""
        left = STEP_BYTES
        for leg in self._legs.values():
            while left > 0 and (piece := self._next(leg)) is not None:
                table = leg.sequence.block_table
                row = leg.sequence.row if piece.is_state else None
                schedule.send.append(KvSend(tuple(table[piece.start : piece.stop]), row))
                left -= self._form.state_nbytes if piece.is_state else self._nbytes(piece)
                self._planned.append((leg, piece))
                self._advance(leg, piece)

    def executed(self, sent: tuple[bytes, ...]) -> None:
        """Send what the step has copied."""
        planned, self._planned = self._planned, []
        for (leg, piece), content in zip(planned, sent, strict=True):
            if leg.key in self._legs:
                self.transfers.send(leg.key, piece, content)

    def close(self) -> None:
        self.transfers.close()

    def take_planned(self) -> list[Sequence]:
        planned, self._planned = self._planned, []
        return [leg.sequence for leg, _ in planned]

    def _nbytes(self, piece: Piece) -> int:
        return (piece.stop - piece.start) * self._form.block_nbytes

    def _next(self, leg: _Leg) -> Piece | None:
        """Return the piece to send next; None if there is none now."""
        if leg.next_block is None or leg.num_untaken >= NUM_UNTAKEN or len(leg.first) < leg.num_samples:
            return None
        return next(self._pieces(leg, leg.next_block), None)

    def _pieces(self, leg: _Leg, start: int) -> Iterator[Piece]:
        num_tokens = leg.sequence.num_prompt_tokens
        num_full, num_blocks = num_tokens // self._form.block_size, -(-num_tokens // self._form.block_size)
        if start < num_full:
            yield Piece(start, min(num_full, start + max(1, MAX_PIECE_BYTES // self._form.block_nbytes)))
        elif start < num_blocks:
            yield Piece(start, num_blocks)
        elif self._form.state_nbytes and not leg.has_sent_state:
            yield Piece(num_blocks, num_blocks, is_state=True)

    def _advance(self, leg: _Leg, piece: Piece) -> None:
        leg.num_untaken += 1
        leg.has_sent_state = leg.has_sent_state or piece.is_state
        leg.next_block = piece.stop
