"""An engine's prefill legs: prompts whose state goes to a decode worker.

A prefill leg is computed like any request, up to the first token of each sample. Its sample 0 then keeps its blocks and
its row until the decode worker has received the state or the transfer fails. Steps copy the state out of the caches in
pieces, at most STEP_BYTES in one step. A piece has full blocks, the last block if it is partial, or the recurrent
states. Sliding-window layers send only the blocks that later tokens see.
"""

from collections import deque
from dataclasses import dataclass, field

from saccade.engine.core.kv_connector import STEP_FAILED, check_key
from saccade.engine.core.kv_legs import STEP_BYTES, KvLegs, Leg
from saccade.engine.core.schedule import KvCopies, Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import WINDOW, Sequence
from saccade.engine.core.step import KvSend
from saccade.errors import InternalError, InvalidValue, PeerFailed
from saccade.protocol.kv_transfer import FirstToken, KvForm, Piece, Prefilled, SendKv
from saccade.protocol.output import FinishReason, TokenLogprob
from saccade.transport.kv_transfer.events import Delivered, Event, PieceTaken, StateRequested, TransferEnded
from saccade.transport.kv_transfer.service import MAX_PIECE_BYTES, KvTransfers

NUM_UNTAKEN = 2
"""Pieces of a transfer in flight: one is used while the other travels."""


@dataclass(slots=True, eq=False)
class _OutgoingPrompt(Leg):
    """A prefill leg's prompt. *next_block* is None until the decode worker asks; *first* has the tokens drawn so far.

    When the state is delivered, sample 0 ends with the reason and the time in *drawn*.
    """

    first: dict[int, FirstToken] = field(default_factory=dict)
    drawn: tuple[FinishReason, float] | None = None
    next_block: int | None = None
    has_sent_state: bool = False
    num_untaken: int = 0


class KvSender(KvLegs[_OutgoingPrompt]):
    """The prefill legs, by transfer key."""

    def __init__(self, transfers: KvTransfers, form: KvForm, scheduler: Scheduler) -> None:
        super().__init__(transfers, form, scheduler)
        self._planned_copies: deque[list[tuple[_OutgoingPrompt, Piece]]] = deque()

    @property
    def has_work(self) -> bool:
        prompts = self._legs.values()
        is_urgent = any(one.sequence.finish_reason is not None or self._next(one) is not None for one in prompts)
        return self.transfers.has_events or is_urgent

    def open(self, sequence: Sequence) -> None:
        """Begin a prefill leg. Raises InvalidValue for a decode leg, and for a prefill leg that cannot be served."""
        request = sequence.request
        kv_transfer = request.kv_transfer
        if kv_transfer is None:
            return
        if not isinstance(kv_transfer, SendKv):
            raise InvalidValue("A prefill worker serves no decode legs.", "kv_transfer")
        check_key(kv_transfer.key, self._legs)
        if request.sampling.max_tokens != 1:
            raise InvalidValue("A prefill leg draws one token: max_tokens must be 1.", "max_tokens")
        manager, rows = self._scheduler.block_manager, self._scheduler.budgets.max_num_seqs
        blocks = manager.paged_blocks.num_blocks
        # The prompt's blocks, and those of one other sample at a time.
        num_blocks = -(-len(request.token_ids) // manager.block_size) + manager.num_sample_blocks(
            len(request.token_ids)
        )
        if request.num_samples > 1 and (request.num_samples > rows or num_blocks > blocks):
            raise InvalidValue(
                f"n is {request.num_samples}, but this prefill worker runs at most {rows} sequences over {blocks} "
                "blocks, and begins no prompt without room for all samples.",
                "n",
            )
        self._legs[kv_transfer.key] = _OutgoingPrompt(kv_transfer.key, sequence)
        self.transfers.offer(kv_transfer.key)

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Record the first token of a sample. Return whether the sample ends only when its state is delivered."""
        kv_transfer = sequence.request.kv_transfer
        prompt = self._legs.get(kv_transfer.key) if isinstance(kv_transfer, SendKv) else None
        if prompt is None or reason is None:
            return False
        prompt.first[sequence.index] = FirstToken(sequence.token_ids[-1], logprob)
        if sequence is prompt.sequence:
            prompt.drawn = reason, now
            self._scheduler.keep(sequence)
            self.transfers.begun(prompt.key)
        if len(prompt.first) == sequence.request.num_samples:
            first = [prompt.first[index] for index in sorted(prompt.first)]
            first_sample = prompt.sequence
            message = Prefilled(first, first_sample.num_cached_tokens or 0, first_sample.prompt_logprobs or [])
            self.transfers.prefilled(prompt.key, message)
        return sequence is prompt.sequence

    def _give_up(self, prompt: _OutgoingPrompt) -> None:
        self.transfers.withdraw(prompt.key)

    def _take_event(self, prompt: _OutgoingPrompt, event: Event) -> None:
        match event:
            case StateRequested(_, first_block):
                prompt.next_block = max(0, first_block)
            case PieceTaken():
                prompt.num_untaken -= 1
            case Delivered() if prompt.drawn is not None:
                del self._legs[prompt.key]
                self._scheduler.answer(prompt.sequence, [prompt.first[0].logprob], *prompt.drawn)
            case Delivered():
                self._scheduler.fail(prompt.sequence, PeerFailed("The decode worker ended the transfer too early."))
            case TransferEnded():
                del self._legs[prompt.key]
                self._scheduler.fail(prompt.sequence, event.error)

    def plan_copies(self, schedule: Schedule) -> KvCopies:
        """Return the pieces that this step copies, the oldest leg's first."""
        room = STEP_BYTES
        copies, sends = [], []
        for prompt in self._legs.values():
            while room > 0 and (piece := self._next(prompt)) is not None:
                sequence, blocks = prompt.sequence, slice(piece.start, piece.stop)
                row = sequence.row if piece.is_state else None
                in_window = tuple(sequence.tables[WINDOW].blocks[blocks]) if piece.has_window else ()
                sends.append(KvSend(tuple(sequence.block_table[blocks]), row, in_window))
                room -= self._form.piece_nbytes(piece)
                copies.append((prompt, piece))
                prompt.num_untaken += 1
                prompt.has_sent_state = prompt.has_sent_state or piece.is_state
                prompt.next_block = piece.stop
        self._planned_copies.append(copies)
        return KvCopies(send=tuple(sends))

    def executed(self, contents: tuple[bytes, ...] | None) -> None:
        """Send the step's copies; if the step failed, fail their requests."""
        copies = self._planned_copies.popleft()
        if contents is None:
            for prompt, _ in copies:
                self._scheduler.fail(prompt.sequence, InternalError(STEP_FAILED))
            return
        for (prompt, piece), content in zip(copies, contents, strict=True):
            if prompt.sequence.finish_reason is None:
                self.transfers.send_piece(prompt.key, piece, content)

    def _next(self, prompt: _OutgoingPrompt) -> Piece | None:
        """Return the piece to send next, if there is one now."""
        start, num_tokens = prompt.next_block, prompt.sequence.num_prompt_tokens
        num_samples = prompt.sequence.request.num_samples
        if start is None or prompt.num_untaken >= NUM_UNTAKEN or len(prompt.first) < num_samples:
            return None
        form = self._form
        num_full, num_blocks = num_tokens // form.block_size, -(-num_tokens // form.block_size)
        # Layers with a window send their blocks from this one on.
        border = prompt.sequence.tables[WINDOW].num_passed
        if start < num_blocks:
            has_window = form.window_nbytes > 0 and start >= border
            end = min(place for place in (border, num_full, num_blocks) if place > start)
            size = form.block_nbytes + has_window * form.window_nbytes
            return Piece(start, min(end, start + max(1, MAX_PIECE_BYTES // size)), has_window=has_window)
        has_more = form.state_nbytes and not prompt.has_sent_state
        return Piece(num_blocks, num_blocks, is_state=True) if has_more else None
