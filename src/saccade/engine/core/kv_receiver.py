"""An engine's decode legs: requests whose prompt state comes from a prefill worker.

The scheduler reserves blocks and rows for all samples of such a request before its transfer begins. Steps write the
received pieces to the blocks. When the state is complete, the samples get their first tokens from the prefill worker
and decode like any others.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from saccade.engine.core.kv_connector import STEP_FAILED, check_key
from saccade.engine.core.kv_legs import STEP_BYTES, KvLegs, Leg
from saccade.engine.core.schedule import KvCopies, Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import WINDOW, Sequence
from saccade.engine.core.step import KvReceive
from saccade.errors import InternalError, InvalidValue, PeerFailed, WorkerFailed
from saccade.protocol.kv_transfer import KvForm, Piece, Prefilled, ReceiveKv
from saccade.transport.kv_transfer.events import Event, PieceArrived, PromptComputed, TransferEnded
from saccade.transport.kv_transfer.service import KvTransfers

OUT_OF_ORDER = "The prefill worker did not send the state of this prompt."
SAMPLE_ENDED = "The first sample of the request ended before the prompt's state arrived; send the request again."


@dataclass(slots=True, eq=False)
class _IncomingPrompt(Leg):
    """A decode leg's prompt. *next_block* is the next block to arrive, or None until the transfer has begun.

    *num_pending* pieces are not written yet.
    """

    next_block: int | None = None
    prefilled: Prefilled | None = None
    arrived: deque[PieceArrived] = field(default_factory=deque)
    num_pending: int = 0
    state: bytes = b""


class KvReceiver(KvLegs[_IncomingPrompt]):
    """The decode legs, by transfer key."""

    def __init__(self, transfers: KvTransfers, form: KvForm, scheduler: Scheduler) -> None:
        super().__init__(transfers, form, scheduler)
        self._planned_writes: deque[list[_IncomingPrompt]] = deque()

    @property
    def has_work(self) -> bool:
        prompts = self._legs.values()
        return self.transfers.has_events or any(
            one.arrived or one.sequence.finish_reason is not None for one in prompts
        )

    def open(self, sequence: Sequence) -> None:
        """Register a decode leg; its transfer begins when there is room for its state.

        Raises InvalidValue for a prefill leg, for an invalid key, and for a decode leg that can never begin.
        """
        request = sequence.request
        kv_transfer = request.kv_transfer
        if kv_transfer is None:
            return
        if not isinstance(kv_transfer, ReceiveKv):
            raise InvalidValue("A decode worker serves no prefill legs.", "kv_transfer")
        check_key(kv_transfer.key, self._legs)
        rows, manager = self._scheduler.budgets.max_num_seqs, self._scheduler.block_manager
        blocks = manager.paged_blocks.num_blocks
        if request.num_samples > rows or not manager.can_reserve(len(request.token_ids), request.num_samples):
            raise InvalidValue(
                f"n is {request.num_samples}, but this decode worker runs at most {rows} sequences over {blocks} "
                "blocks, and begins all samples of a request together.",
                "n",
            )
        self._legs[kv_transfer.key] = _IncomingPrompt(kv_transfer.key, sequence)

    def _give_up(self, prompt: _IncomingPrompt) -> None:
        if prompt.next_block is not None:
            self.transfers.cancel(prompt.key)
        for sample in [one for one in prompt.sequence.forks if one.finish_reason is None][:1]:
            self._scheduler.fail(sample, WorkerFailed(SAMPLE_ENDED))

    def _take_event(self, prompt: _IncomingPrompt, event: Event) -> None:
        match event:
            case PromptComputed(_, prefilled):
                prompt.prefilled = prefilled
                if len(prefilled.first) != prompt.sequence.request.num_samples:
                    self._scheduler.fail(prompt.sequence, PeerFailed(OUT_OF_ORDER))
            case PieceArrived(_, piece, content) if piece.is_state:
                prompt.state = content
                self.transfers.taken(prompt.key)
            case PieceArrived(_, piece):
                if piece.start != prompt.next_block or not self._is_piece_of(prompt.sequence, piece):
                    self._scheduler.fail(prompt.sequence, PeerFailed(OUT_OF_ORDER))
                    return
                prompt.next_block = piece.stop
                prompt.num_pending += 1
                prompt.arrived.append(event)
            case TransferEnded():
                self._scheduler.fail(prompt.sequence, event.error)
        self._complete_if_whole(prompt)

    def _is_piece_of(self, sequence: Sequence, piece: Piece) -> bool:
        """Whether *piece* has the prompt's blocks, and those of sliding-window layers if the sequence needs them."""
        end = border = len(sequence.block_table)
        if self._form.window_nbytes:
            border = sequence.tables[WINDOW].num_passed
        needs_window = piece.start >= border
        return piece.start < piece.stop <= (end if needs_window else border) and piece.has_window == needs_window

    def plan_copies(self, schedule: Schedule) -> KvCopies:
        """Begin the transfers of requests that the step admits, and return what this step writes."""
        for sequence, num_cached_blocks in schedule.admitted.items():
            if isinstance(kv_transfer := sequence.request.kv_transfer, ReceiveKv):
                self._legs[kv_transfer.key].next_block = num_cached_blocks
                self.transfers.pull(kv_transfer.key, kv_transfer.source, num_cached_blocks)
        room = STEP_BYTES
        writes, receives = list[_IncomingPrompt](), list[KvReceive]()
        for prompt in self._legs.values():
            # A step in flight that failed may have ended the sequence after `settle`.
            while room > 0 and prompt.arrived and prompt.sequence.finish_reason is None:
                _, piece, content = prompt.arrived.popleft()
                room -= len(content)
                writes.append(prompt)
                receives += [_receive(sample, piece, content) for sample in self._owners(prompt, piece.stop)]
        self._planned_writes.append(writes)
        return KvCopies(receive=tuple(receives))

    def _owners(self, prompt: _IncomingPrompt, stop: int) -> list[Sequence]:
        """Return the samples whose blocks must get a piece that ends at block *stop*.

        Shared blocks count as blocks of sample 0.
        """
        is_shared = stop <= prompt.sequence.num_prompt_tokens // self._form.block_size
        samples = self._scheduler.receiving[prompt.sequence]
        return [prompt.sequence] if is_shared else [sample for sample in samples if sample.finish_reason is None]

    def executed(self, contents: tuple[bytes, ...] | None) -> None:
        """Record that the step wrote the planned pieces; if it failed, fail their requests.

        Requests whose state is complete begin to decode.
        """
        for prompt in self._planned_writes.popleft():
            if contents is None:
                self._scheduler.fail(prompt.sequence, InternalError(STEP_FAILED))
            elif prompt.sequence.finish_reason is None:
                prompt.num_pending -= 1
                self.transfers.taken(prompt.key)
                self._complete_if_whole(prompt)

    def _complete_if_whole(self, prompt: _IncomingPrompt) -> None:
        is_whole = prompt.next_block == len(prompt.sequence.block_table) and not prompt.num_pending
        has_state = len(prompt.state) == self._form.state_nbytes
        if prompt.sequence.finish_reason is not None or prompt.prefilled is None or not (is_whole and has_state):
            return
        del self._legs[prompt.key]
        self.transfers.received(prompt.key)
        samples = self._scheduler.receiving[prompt.sequence]
        self._scheduler.finish_receiving(prompt.sequence)
        now = time.perf_counter()
        for sample in samples:
            if sample.finish_reason is None:
                self._begin_to_decode(sample, prompt.prefilled, prompt.state, now)

    def _begin_to_decode(self, sample: Sequence, prefilled: Prefilled, state: bytes, now: float) -> None:
        first = prefilled.first[sample.index]
        sample.received_state = state
        sample.clock.scheduled = sample.clock.first_token = now
        sample.num_cached_tokens = 0 if sample.index else prefilled.num_cached_tokens
        if sample.prompt_logprobs is not None:
            sample.prompt_logprobs = prefilled.prompt_logprobs
        self._scheduler.answer(sample, [first.logprob], sample.append(first.token_id), now)


def _receive(sample: Sequence, piece: Piece, content: bytes) -> KvReceive:
    blocks = slice(piece.start, piece.stop)
    in_window = tuple(sample.tables[WINDOW].blocks[blocks]) if piece.has_window else ()
    return KvReceive(tuple(sample.block_table[blocks]), content, window_blocks=in_window)
