"""An engine's sequences, which wait, run, get their tokens and end. Does not import torch.

`scheduling` chooses each step's work among them, and `results` applies what the step computes.
"""

import bisect
import time
from collections import defaultdict
from itertools import chain

import msgspec
import structlog

from saccade.engine.core.counters import Counters
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts, EncoderScheduler
from saccade.engine.core.frames import Frames
from saccade.engine.core.images import Until
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.kv_connector import KvConnector
from saccade.engine.core.non_finite import NonFiniteLog
from saccade.engine.core.samples import Samples
from saccade.engine.core.schedule import Budgets, Schedule
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Speculation
from saccade.engine.core.step_builder import Rows
from saccade.errors import QueueFull, SaccadeError
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_transfer import SendKv
from saccade.protocol.output import Failure, FinishReason, TokenDelta, TokenLogprob

SAMPLES_EACH = 8
"""Samples may wait for rows, this many for each request that may wait: a few requests with many do not close a worker.
"""

logger = structlog.get_logger(__name__)


class Scheduler:
    """An engine's requests, and their sequences, grouped by what each waits for.

    - requests: the samples of each request, by connection and request_id.
    - waiting: sequences without a row, by priority and arrival.
    - running: sequences with a row, in order of admission.
    - parked: sequences that wait for pixels, a grammar, or the end of other samples.
    - sending: sequences whose prompt state goes to another engine. They have their first token, and keep their blocks
          and row.
    - receiving: for each request whose prompt state comes from another engine, its samples, keyed by sample 0. They
          hold blocks and, now or soon, rows.
    - leaving: sequences that have ended while a step in flight still computes a token for them. Their rows and blocks
          become free when that step is collected.
    - pixel_deadlines: when each request stops waiting for pixels from its gateway, as a time.monotonic() value.
    - is_blocked: whether only the end of a transfer can make room.
    - frames: the step's output.
    - kv_connector: gets every drawn token.

    The time to schedule a step is proportional to the number of sequences.

    **Several samples.** A request with n samples is one sequence until its first token is drawn. Then the other samples
    wait as separate sequences, sample i as though it had come i requests after the first. Samples over the request's
    limit are parked until others end. Each sample finds the prompt's full blocks in the prefix cache, so it computes at
    most one block and draws its own first token. Without a prefix cache it computes the whole prompt again, but encodes
    no image again while the encoder cache has room. Slots that were never read are released when the last sample ends.

    **If a prompt's state is received**, all samples are sequences from the start, and they begin together.

    **If a prompt's state is sent**, sending begins once every sample has its first token. The prompt is admitted only
    if there are rows for all samples, and blocks for itself and one more sample. The other samples go before everything
    else that waits, and end at their first token. Otherwise such prompts could hold every row while they wait for
    samples that have none.
    """

    def __init__(
        self,
        budgets: Budgets,
        block_manager: BlockManager,
        encoder_cache: EncoderCache,
        costs: EncodeCosts,
        speculation: Speculation | None = None,
    ) -> None:
        self.budgets, self.block_manager, self.speculation = budgets, block_manager, speculation
        self.counters, self.frames, self.kv_connector = Counters(), Frames(), KvConnector()
        self.rows = Rows(budgets.max_num_seqs)
        self.encoder_scheduler = EncoderScheduler(
            budgets, block_manager, encoder_cache, costs, self.frames, self.counters
        )
        self.requests: dict[int, dict[str, Samples]] = defaultdict(dict)
        self.pixel_deadlines: dict[tuple[int, str], float] = {}
        self.waiting: list[Sequence] = []
        self.running: dict[Sequence, None] = {}
        self.parked: dict[Sequence, None] = {}
        self.sending: dict[Sequence, None] = {}
        self.leaving: dict[Sequence, None] = {}
        self.receiving: dict[Sequence, list[Sequence]] = {}
        self.is_blocked = False
        self._newest_preempted = 0
        self.non_finite_log = NonFiniteLog()

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something.

        Parked sequences do not count, nor do sequences that wait for the end of a transfer.
        """
        return bool(self.running or (self.waiting and not self.is_blocked))

    @property
    def num_admitted(self) -> int:
        """The number of sequences that have or need a row."""
        return len(self.running) + len(self.sending) + len(self.leaving) + sum(map(len, self.receiving.values()))

    @property
    def can_go_ahead(self) -> bool:
        """Whether a step can be planned while another is in flight.

        This is so if a sequence can go on and none would be preempted.
        """
        is_stuck = all(sequence.waits_for_commit for sequence in self.running)
        return not is_stuck and self.block_manager.fits_next(self.running)

    def load(self) -> Load:
        """Return a snapshot of the counters."""
        blocks = self.block_manager.paged_blocks
        return Load(
            num_running=self.num_admitted,
            num_waiting=len(self.waiting) + len(self.parked),
            num_waiting_tokens=self._count_waiting_tokens(),
            num_blocks=blocks.num_blocks,
            num_free_blocks=self.block_manager.num_free_blocks,
            encoder_cache_bytes=self.encoder_scheduler.encoder_cache.used_bytes,
            evicted_blocks_total=blocks.num_evicted,
            **msgspec.structs.asdict(self.counters)
            | self.block_manager.stateless_tokens
            | {"steps_by_tokens": tuple(self.counters.steps_by_tokens)},
        )

    def _count_waiting_tokens(self) -> int:
        """Return the number of prompt tokens to compute here, including those that may be in the prefix cache.

        Prompts whose state comes from another engine are computed there. The samples of a request have one prompt.
        """
        return sum(
            max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
            for sequence in chain(self.waiting, self.parked, self.running)
            if not sequence.index and not sequence.awaits_kv
        )

    def check_queue(self) -> None:
        """Raise QueueFull if the maximum number of requests waits, or SAMPLES_EACH times as many samples."""
        num_sequences, most = len(self.waiting) + len(self.parked), self.budgets.max_num_waiting
        if num_sequences < most:
            return
        num_requests = sum(not sequence.index for sequence in chain(self.waiting, self.parked))
        if num_requests >= most or num_sequences >= SAMPLES_EACH * most:
            raise QueueFull(f"{num_requests} requests are waiting at this worker already; try again shortly.")

    def find(self, connection: int, request_id: str) -> Samples | None:
        """Return a request's samples if the request has not ended."""
        return self.requests.get(connection, {}).get(request_id)

    def samples(self, connection: int, request_id: str) -> list[Sequence]:
        """Return the samples that are sequences now; all share the same images and pixels."""
        request = self.find(connection, request_id)
        return [] if request is None else list(request.live.values())

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a request, given its sample 0."""
        request = Samples.of_sequence(sequence)
        self.requests[sequence.connection][sequence.request_id] = request
        if sequence.awaits_kv:
            sequence.forks = request.begin_samples(sequence)
        sequence.leads_samples = bool(request.unstarted)
        self._queue(sequence)

    def launch(self, schedule: Schedule) -> None:
        """Record that a step is in flight; the next step is planned to begin at its end."""
        self.encoder_scheduler.launched.update(schedule.encoded)
        for sequence, num_tokens in schedule.chunks.items():
            sequence.num_launched_tokens += num_tokens
            sequence.num_steps_in_flight += 1

    def owners(self, schedule: Schedule) -> list[Sequence]:
        """Return the sequences that a step computes for, including those that only wait for one of its images."""
        others = (one for one in self.running if one not in schedule.chunks) if schedule.images else ()
        return [*schedule.chunks, *(one for one in others if one.needs(schedule.images))]

    def abandon(self, schedule: Schedule) -> None:
        """Forget a failed step, whose requests have ended."""
        self.encoder_scheduler.abandon_step(schedule)
        self.land(schedule)

    def answer(
        self, sequence: Sequence, logprobs: list[TokenLogprob | None], reason: FinishReason | None, now: float
    ) -> None:
        """Send the newest tokens of *sequence*, one for each of *logprobs*. With a *reason*, end the sequence."""
        is_first = sequence.num_generated_tokens == len(logprobs)
        delta = TokenDelta(
            sequence.request_id,
            sequence.token_ids[-len(logprobs) :],
            reason,
            sequence.num_cached_tokens or 0 if is_first else 0,
            index=sequence.index,
            logprobs=[logprob for logprob in logprobs if logprob is not None],
            prompt_logprobs=sequence.prompt_logprobs or [] if is_first else [],
            times=None if reason is None else sequence.clock.times(now),
        )
        self.frames[sequence.connection].deltas.append(delta)
        if reason is not None:
            self._finish(sequence, reason)

    def end_sequence(self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> None:
        """End *sequence* without another token."""
        times = sequence.clock.times(time.perf_counter())
        delta = TokenDelta(sequence.request_id, [], reason, failure=failure, index=sequence.index, times=times)
        self.frames[sequence.connection].deltas.append(delta)
        self._finish(sequence, reason)

    def fail(self, sequence: Sequence, error: SaccadeError) -> None:
        """End the whole request of *sequence* with one error, unless the sequence has ended."""
        request = self.find(sequence.connection, sequence.request_id)
        if request is None or sequence.finish_reason is not None:
            return
        request.unstarted.clear()
        self.end_sequence(sequence, FinishReason.ERROR, failure_of(error))
        for sample in list(request.live.values()):
            self._finish(sample, FinishReason.ERROR)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End *sequence*, and free what it holds."""
        request = self.requests[sequence.connection][sequence.request_id]
        sequence.finish_reason = reason
        del request.live[sequence.index]
        if request.unstarted:
            # It ends before its first token, which the other samples wait for: the next sample takes its place.
            following = sequence.sample(request.unstarted.pop(0))
            request.live[following.index] = following
            following.leads_samples = True
            self.encoder_scheduler.share(sequence, [following])
            self._queue(following)
        following_parked = None if sequence in self.parked else request.next_of(self.parked)
        self.remove(sequence)
        if following_parked is not None:
            self.resume(following_parked)
        if not request.live:
            for image in sequence.images:
                image.release(self.frames[sequence.connection].released)
            del self.requests[sequence.connection][sequence.request_id]
            # A later request may have its id.
            self.pixel_deadlines.pop((sequence.connection, sequence.request_id), None)

    def start_samples(self, sequence: Sequence) -> None:
        """Queue the samples that wait for the prompt of *sequence*. Call this before its first token is added."""
        request = self.requests[sequence.connection][sequence.request_id]
        num_more = request.num_at_once - len(request.live)
        samples = request.begin_samples(sequence)
        sequence.leads_samples = False
        for sample in samples:
            # Sample 0 already reports the cached tokens of the request.
            sample.num_cached_tokens = 0
            sample.completes_prompt = isinstance(sequence.request.kv_transfer, SendKv)
        self.encoder_scheduler.share(sequence, samples)
        for sample in samples[:num_more]:
            self._queue(sample)
        for sample in samples[num_more:]:
            request.parked.append(sample)
            self.parked[sample] = None

    def land(self, schedule: Schedule) -> int:
        """Record that a step is collected, and return how many tokens it computed for sequences that have not ended."""
        num_computed = 0
        for sequence, num_tokens in schedule.chunks.items():
            sequence.num_steps_in_flight -= 1
            if sequence in self.leaving and not sequence.num_steps_in_flight:
                del self.leaving[sequence]
                self._release(sequence)
            if sequence.finish_reason is not None:
                continue
            start = sequence.num_computed_tokens
            if sequence in schedule.proposals:
                # The sequence has the tokens that it accepted, and the next one.
                num_in_step, num_tokens = num_tokens, sequence.num_tokens - 1 - start
                sequence.num_launched_tokens = start + num_tokens
                if num_tokens < num_in_step:
                    sequence.kept_state = num_tokens - 1
            self.block_manager.commit(sequence, start + num_tokens)
            if sequence.images:
                self.encoder_scheduler.commit(sequence, start)
            num_computed += num_tokens
        return num_computed

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or lacks pixels from every queue, and free its state."""
        self._unqueue(sequence)
        self.receiving.pop(sequence, None)
        for group in (self.running, self.parked, self.sending):
            group.pop(sequence, None)
        if sequence.num_steps_in_flight:
            self.leaving[sequence] = None
        else:
            self._release(sequence)
        self.encoder_scheduler.unpin(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Keep the state of a running sequence, which computes nothing more, until it ends."""
        del self.running[sequence]
        self.sending[sequence] = None

    def finish_receiving(self, sequence: Sequence) -> None:
        """Begin to decode the samples of *sequence*, whose prompt state has arrived."""
        for sample in self.receiving.pop(sequence):
            if sample.finish_reason is None:
                self.block_manager.commit(sample, sample.num_prompt_tokens)
                sample.awaits_kv = False
                self.running[sample] = None

    def park(self, sequence: Sequence) -> None:
        """Remove *sequence*, which lacks pixels, from the queues until resume()."""
        self.remove(sequence)
        self.parked[sequence] = None

    def resume(self, sequence: Sequence) -> None:
        """Queue a parked sequence according to its turn, because it no longer has to wait."""
        del self.parked[sequence]
        self._queue(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's state between two steps, and queue the sequence again according to its turn."""
        del self.running[sequence]
        self._release(sequence)
        self.encoder_scheduler.unpin(sequence, (Until.COMPUTED,))
        self._queue(sequence)
        self.counters.preemptions_total += 1

    @property
    def can_start_over(self) -> bool:
        """Whether every sequence can be recomputed from scratch.

        A sequence that has a token and whose images came by hash cannot, since its gateway may have dropped them. Every
        sequence must also have arrived after those that the last `start_over` preempted.
        """
        return all(
            one.arrival > self._newest_preempted and (one.recomputable or not (one.num_generated_tokens or one.index))
            for one in (*self.running, *self.waiting, *self.parked)
        )

    def start_over(self) -> None:
        """Free the state of every sequence between two steps, and empty the caches."""
        self._newest_preempted = max((one.arrival for one in self.running), default=self._newest_preempted)
        for sequence in list(self.running):
            self.preempt(sequence)
        for sequence in (*self.waiting, *self.parked):
            self.encoder_scheduler.unpin(sequence)
        self.encoder_scheduler.abandon_unpinned()
        self.reset_caches(prefix=True, media=True)

    def reset_caches(self, *, prefix: bool, media: bool) -> None:
        """Drop KV blocks and encoder outputs that no request uses; watchers of the caches are notified."""
        if prefix:
            self.block_manager.clear()
        if media:
            self.encoder_scheduler.encoder_cache.clear()

    def _queue(self, sequence: Sequence) -> None:
        self.is_blocked = False
        sequence.speculates = self.speculation is not None
        if sequence.awaits_grammar:
            self.parked[sequence] = None
            return
        bisect.insort(self.waiting, sequence, key=_turn)

    def _unqueue(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.waiting, _turn(sequence), key=_turn)
        if index < len(self.waiting) and self.waiting[index] is sequence:
            del self.waiting[index]

    def _release(self, sequence: Sequence) -> None:
        self.is_blocked = False
        self.block_manager.release_sequence(sequence)
        self.rows.end_row(sequence)
        sequence.received_state = b""


def failure_of(error: SaccadeError) -> Failure:
    """Return *error* in the form in which it is sent."""
    return Failure(error.code, error.message, error.param)


def _turn(sequence: Sequence) -> tuple[bool, tuple[int, int, int]]:
    return not sequence.completes_prompt, sequence.turn
