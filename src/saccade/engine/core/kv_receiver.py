"""The decode legs of an engine: requests whose prompt's state comes from a prefill worker.

The scheduler reserves blocks and rows for all samples of such a request before its transfer begins. Steps write the
pieces to the blocks. When the state is complete, the samples get their first tokens from the prefill worker and decode
like any others.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from saccade.engine.core.kv_connector import check_key
from saccade.engine.core.requests import Requests
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import KvReceive
from saccade.errors import InvalidValue, PeerFailed, WorkerFailed
from saccade.protocol.kv_transfer import KvForm, Prefilled, ReceiveKv
from saccade.protocol.output import FinishReason, TokenLogprob
from saccade.protocol.request import EngineRequest
from saccade.transport.kv_transfer.events import Event, PieceArrived, PromptComputed, TransferEnded
from saccade.transport.kv_transfer.service import MAX_PIECE_BYTES, KvTransfers

STEP_BYTES = 2 * MAX_PIECE_BYTES
"""The most state that one step writes; the step's requests wait for it."""

OUT_OF_ORDER = "The prefill worker did not send the state of this prompt."
SAMPLE_ENDED = "The first sample of the request ended before the prompt's state arrived; send the request again."


@dataclass(slots=True, eq=False)
class _IncomingPrompt:
    """The prompt of a decode leg. *next_block* arrives next; *num_pending* pieces are not written yet."""

    key: bytes
    sequence: Sequence
    next_block: int
    prefilled: Prefilled | None = None
    arrived: deque[PieceArrived] = field(default_factory=deque)
    num_pending: int = 0
    state: bytes = b""


class KvReceiver:
    """The decode legs by the keys of their transfers."""

    def __init__(self, transfers: KvTransfers, form: KvForm, scheduler: Scheduler, requests: Requests) -> None:
        self.transfers = transfers
        self._form = form
        self._scheduler = scheduler
        self._requests = requests
        self._keys: set[bytes] = set()
        self._prompts: dict[bytes, _IncomingPrompt] = {}
        self._planned_writes: list[_IncomingPrompt] = []
        self._orphans: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        has_pieces = any(prompt.arrived for prompt in self._prompts.values())
        return has_pieces or bool(self._orphans) or self.transfers.has_events

    @property
    def wake_fds(self) -> tuple[int, ...]:
        return (self.transfers.wake_fd,)

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidValue for a prefill leg, and for a decode leg that can never begin."""
        kv_transfer = request.kv_transfer
        if kv_transfer is None:
            return
        if not isinstance(kv_transfer, ReceiveKv):
            raise InvalidValue("A decode worker serves no prefill legs.", "kv_transfer")
        check_key(kv_transfer.key, self._keys)
        num_blocks = -(-len(request.token_ids) // self._form.block_size) + request.num_samples - 1
        rows, blocks = self._scheduler.budgets.max_num_seqs, self._scheduler.block_manager.paged_blocks.num_blocks
        if request.num_samples > rows or num_blocks > blocks:
            raise InvalidValue(
                f"n is {request.num_samples}, but this decode worker runs at most {rows} sequences over {blocks} "
                "blocks, and begins all samples of a request together.",
                "n",
            )

    def open(self, sequence: Sequence) -> None:
        """Note the key of a decode leg; its transfer begins when there is room for its state."""
        if isinstance(kv_transfer := sequence.request.kv_transfer, ReceiveKv):
            self._keys.add(kv_transfer.key)

    def keep(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> bool:
        """Return False: a decode leg reports its tokens at once."""
        return False

    def poll(self) -> None:
        for event in self.transfers.events():
            if (prompt := self._prompts.get(event.key)) is not None:
                self._take(prompt, event)
        orphans, self._orphans = self._orphans, []
        for sequence in orphans:
            self._requests.fail(sequence, WorkerFailed(SAMPLE_ENDED))

    def _begin(self, sequence: Sequence, num_cached_blocks: int) -> None:
        """Begin the transfer for a sequence with reserved room, from block *num_cached_blocks* on."""
        kv_transfer = sequence.request.kv_transfer
        if isinstance(kv_transfer, ReceiveKv):
            self._prompts[kv_transfer.key] = _IncomingPrompt(kv_transfer.key, sequence, num_cached_blocks)
            self.transfers.pull(kv_transfer.key, kv_transfer.source, num_cached_blocks)

    def _take(self, prompt: _IncomingPrompt, event: Event) -> None:
        match event:
            case PromptComputed(_, prefilled):
                prompt.prefilled = prefilled
                if len(prefilled.first) != prompt.sequence.request.num_samples:
                    self._fail(prompt, PeerFailed(OUT_OF_ORDER))
            case PieceArrived(_, piece, content) if piece.is_state:
                prompt.state = content
                self.transfers.taken(prompt.key)
            case PieceArrived(_, piece):
                if not (piece.start == prompt.next_block < piece.stop <= len(prompt.sequence.block_table)):
                    self._fail(prompt, PeerFailed(OUT_OF_ORDER))
                    return
                prompt.next_block = piece.stop
                prompt.num_pending += 1
                prompt.arrived.append(event)
            case TransferEnded():
                self._fail(prompt, event.error)
        self._complete_if_whole(prompt)

    def on_end(self, sequence: Sequence) -> None:
        """Cancel the transfer of a sequence that has ended."""
        kv_transfer = sequence.request.kv_transfer
        if isinstance(kv_transfer, ReceiveKv) and sequence.awaits_kv and sequence.index == 0:
            self._keys.discard(kv_transfer.key)
            if self._prompts.pop(kv_transfer.key, None) is not None:
                self.transfers.cancel(kv_transfer.key)
            self._orphans += [sample for sample in sequence.forks if sample.finish_reason is None][:1]

    def plan(self, schedule: Schedule) -> None:
        """Begin the transfers of requests that the step admits, and add the writes of this step."""
        for sequence, num_cached_blocks in schedule.admitted.items():
            self._begin(sequence, num_cached_blocks)
        room = STEP_BYTES
        for prompt in self._prompts.values():
            while room > 0 and prompt.arrived:
                _, piece, content = prompt.arrived.popleft()
                room -= len(content)
                self._planned_writes.append(prompt)
                schedule.receive += [
                    KvReceive(tuple(sample.block_table[piece.start : piece.stop]), content)
                    for sample in self._owners(prompt, piece.stop)
                ]

    def _owners(self, prompt: _IncomingPrompt, stop: int) -> list[Sequence]:
        """Return the samples that have their own blocks for a piece that ends at block *stop*."""
        is_shared = stop <= prompt.sequence.num_prompt_tokens // self._form.block_size
        samples = self._scheduler.receiving[prompt.sequence]
        return [prompt.sequence] if is_shared else [sample for sample in samples if sample.finish_reason is None]

    def on_executed(self, contents: tuple[bytes, ...]) -> None:
        """Note that the step wrote the planned pieces. Requests whose state is complete begin to decode."""
        writes, self._planned_writes = self._planned_writes, []
        for prompt in writes:
            prompt.num_pending -= 1
            if prompt.key in self._prompts:
                self.transfers.taken(prompt.key)
                self._complete_if_whole(prompt)

    def close(self) -> None:
        self.transfers.close()

    def take_planned(self) -> list[Sequence]:
        writes, self._planned_writes = self._planned_writes, []
        return [prompt.sequence for prompt in writes]

    def _fail(self, prompt: _IncomingPrompt, error: WorkerFailed) -> None:
        # Ending the sequence cancels the transfer.
        self._requests.fail(prompt.sequence, error)

    def _complete_if_whole(self, prompt: _IncomingPrompt) -> None:
        is_whole = prompt.next_block == len(prompt.sequence.block_table) and not prompt.num_pending
        has_state = len(prompt.state) == self._form.state_nbytes
        if prompt.key not in self._prompts or prompt.prefilled is None or not (is_whole and has_state):
            return
        del self._prompts[prompt.key]
        self._keys.discard(prompt.key)
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
        sample.token_ids.append(first.token_id)
        self._requests.answer(sample, first.logprob, self._requests.finish_reason(sample, first.token_id), now)
