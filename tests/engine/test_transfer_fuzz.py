"""A prefill and a decode engine, joined by a transfer that delays and fails: every answer is the one computed alone."""

import random
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import engines
import msgspec
import pytest
import shadow
from conformance_sample import Seeds
from shadow import BLOCK_BYTES, BLOCK_SIZE, DIGEST_BYTES, PLACEHOLDER, SPEC, ShadowExecutor

from saccade.engine.core import kv_receiver, kv_sender
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.speculation import Speculation
from saccade.engine.loop import Engine
from saccade.protocol.kv_transfer import KEY_BYTES, KvForm, Piece, Prefilled, ReceiveKv, SendKv
from saccade.protocol.output import FinishReason, StepFrame
from saccade.protocol.request import EngineRequest, MediaPixels, SamplingParams, SupplyPixels
from saccade.transport.kv_transfer.events import (
    Delivered,
    Event,
    PieceArrived,
    PieceTaken,
    PromptComputed,
    StateRequested,
    TransferEnded,
)

pytestmark = pytest.mark.ci

MAX_MODEL_LEN = 120
NUM_STEPS, MOST_STEPS = 250, 4250
PATIENCE_TURNS = 60
Sample = tuple[str, int]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has two blocks, and a step copies three."""
    monkeypatch.setattr(kv_sender, "MAX_PIECE_BYTES", 2 * BLOCK_BYTES)
    for module in (kv_sender, kv_receiver):
        monkeypatch.setattr(module, "STEP_BYTES", 3 * BLOCK_BYTES)


@dataclass
class Transfer:
    """One transfer on its way: messages to the decode engine and replies to the prefill engine."""

    is_offered: bool = False
    first_block: int | None = None
    is_connected: bool = False
    num_turns: int = 0
    messages: deque[Event] = field(default_factory=deque)
    replies: deque[str] = field(default_factory=deque)


class Wire:
    """Stands where KvTransfers stands at both ends; *failing* is the share of turns in which a transfer breaks."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        self.transfers: defaultdict[bytes, Transfer] = defaultdict(Transfer)
        self.to_prefill: deque[Event] = deque()
        self.to_decode: deque[Event] = deque()
        self._rng = rng
        self._failing = failing

    @property
    def is_idle(self) -> bool:
        return not (self.transfers or self.to_prefill or self.to_decode)

    def end(self, key: bytes, *told: deque[Event], reason: str = "The connection closed.") -> None:
        """Forget a transfer; each end of *told* hears of it."""
        if self.transfers.pop(key, None) is not None:
            for events in told:
                events.append(TransferEnded(key, reason))

    def turn(self) -> None:
        """Move some messages."""
        for key, transfer in list(self.transfers.items()):
            if transfer.first_block is None or self._rng.random() < 0.4:
                continue
            if not transfer.is_connected:
                transfer.num_turns += 1
                if transfer.is_offered:
                    transfer.is_connected = True
                    self.to_prefill.append(StateRequested(key, transfer.first_block))
                elif transfer.num_turns > PATIENCE_TURNS:
                    self.end(key, self.to_decode, reason="The prefill worker does not know the transfer.")
            elif self._rng.random() < self._failing:
                self.end(key, self.to_prefill, self.to_decode)
            else:
                self._move(key, transfer)

    def _move(self, key: bytes, transfer: Transfer) -> None:
        while transfer.messages and self._rng.random() < 0.7:
            self.to_decode.append(transfer.messages.popleft())
        while transfer.replies and self._rng.random() < 0.7:
            if transfer.replies.popleft() == "taken":
                self.to_prefill.append(PieceTaken(key))
            else:
                self.to_prefill.append(Delivered(key))
                del self.transfers[key]
                return


class End:
    """One end of the wire."""

    wake_fd = 0
    address = "prefill:1"

    def __init__(self, wire: Wire, events: deque[Event]) -> None:
        self._wire = wire
        self._events = events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def events(self) -> list[Event]:
        taken = list(self._events)
        self._events.clear()
        return taken

    def close(self) -> None:
        """Nothing runs."""

    def offer(self, key: bytes) -> None:
        self._wire.transfers[key].is_offered = True

    def begun(self, key: bytes) -> None:
        """No deadline runs here."""

    def prefilled(self, key: bytes, message: Prefilled) -> None:
        self._put(key, PromptComputed(key, message))

    def send_piece(self, key: bytes, piece: Piece, content: bytes) -> None:
        self._put(key, PieceArrived(key, piece, content))

    def _put(self, key: bytes, event: Event) -> None:
        if key in self._wire.transfers:
            self._wire.transfers[key].messages.append(event)

    def withdraw(self, key: bytes) -> None:
        transfer = self._wire.transfers.get(key)
        is_waited_for = transfer is not None and transfer.first_block is not None
        self._wire.end(key, *([self._wire.to_decode] if is_waited_for else []))

    def pull(self, key: bytes, source: str, first_block: int) -> None:
        self._wire.transfers[key].first_block = first_block

    def taken(self, key: bytes) -> None:
        self._reply(key, "taken")

    def received(self, key: bytes) -> None:
        self._reply(key, "received")

    def _reply(self, key: bytes, reply: str) -> None:
        if key in self._wire.transfers:
            self._wire.transfers[key].replies.append(reply)

    def cancel(self, key: bytes) -> None:
        transfer = self._wire.transfers.get(key)
        if transfer is not None and transfer.is_connected:
            self._wire.end(key, self._wire.to_prefill)
        elif transfer is not None and transfer.is_offered:
            transfer.first_block = None
        else:
            self._wire.end(key)


class Pair:
    """Both engines, the gateway's half of every request, and what was answered."""

    def __init__(
        self,
        seed: int,
        failing: float,
        num_samples: tuple[int, ...],
        max_num_seqs: int | None = None,
        steps_ahead: int = 0,
        has_window: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.window = self.rng.choice((1, 2, 5, 8, 9, 21)) if has_window else None
        self.whole_images = has_window and self.rng.random() < 0.5
        self.num_samples = num_samples
        self.steps_ahead = steps_ahead
        self.speculates = seed % 2 == 1
        self.pixels: dict[bytes, bytes] = {}
        self.is_recurrent = self.rng.random() < 0.5 and not has_window
        self.wire = Wire(self.rng, failing)
        self.executors: list[ShadowExecutor] = []
        self.prefill = self._engine("prefill", self.wire.to_prefill, failing, max_num_seqs)
        self.decode = self._engine("decode", self.wire.to_decode, failing, max_num_seqs)
        self.requests: dict[str, EngineRequest] = {}
        self.answers: defaultdict[Sample, list[int]] = defaultdict(list)
        self.ends: dict[Sample, FinishReason] = {}
        self._wanted: list[tuple[Engine, str, list[int]]] = []
        self._prefill_ended: set[str] = set()

    def _engine(self, role: str, events: deque[Event], failing: float, max_num_seqs: int | None) -> Engine:
        rows = max_num_seqs or self.rng.randint(2, 6)
        blocks = self.rng.randint(30, 60) if max_num_seqs is None else 16 * max_num_seqs
        # With as many requests as rows, one step has room for all of their prompts.
        num_tokens = None if max_num_seqs is None else MAX_MODEL_LEN * max_num_seqs
        state_bytes, window_bytes = DIGEST_BYTES * self.is_recurrent, BLOCK_BYTES * (self.window is not None)
        form = KvForm(b"f", "a", "a", BLOCK_SIZE, BLOCK_BYTES, state_bytes, window_nbytes=window_bytes)
        proposer = shadow.ScriptedProposer(random.Random(rows), 0.7, self.pixels)
        speculation = engines.untimed(Speculation(proposer, 3)) if self.speculates else None
        connector = kv_sender.KvSender if role == "prefill" else kv_receiver.KvReceiver
        scheduler = shadow.scheduler(
            self.rng,
            self.is_recurrent,
            rows,
            blocks,
            num_tokens,
            speculation=speculation,
            window=self.window,
            whole_images=self.whole_images,
        )
        window_blocks = scheduler.block_manager.window_blocks
        executor = ShadowExecutor(
            self.rng, self.is_recurrent, failing, window_blocks=window_blocks, whole_images=self.whole_images
        )
        self.executors.append(executor)
        return Engine(
            executor,  # type: ignore[arg-type]
            scheduler,
            RequestValidator(SPEC, b"f" * 32, MAX_MODEL_LEN),  # type: ignore[arg-type]
            SimpleNamespace(role=role),  # type: ignore[arg-type]
            new_connector=partial(connector, End(self.wire, events), form),  # type: ignore[arg-type]
            steps_ahead=self.steps_ahead,
        )

    def submit(self) -> None:
        """Send both legs of a new random request, in either order."""
        rng, name = self.rng, str(len(self.requests))
        ids: list[int] = []
        media = []
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.7:
                ids += [rng.choice((1, 2)) for _ in range(rng.randint(1, 14))]
            else:
                media.append(shadow.image(rng.choice(b"abc"), rng.randint(1, 5), len(ids)))
                ids += [PLACEHOLDER] * media[-1].spans[0].length
        self.pixels |= {item.content_hash: item.inline or b"" for item in media}
        key = len(self.requests).to_bytes(KEY_BYTES, "big")
        sampling = SamplingParams(max_tokens=rng.randint(1, 25), temperature=0, stop_token_ids=(rng.randrange(60),))
        request = EngineRequest(
            request_id=name,
            token_ids=ids,
            sampling=sampling,
            media=shadow.without_pixels(tuple(media)),
            num_samples=rng.choice(self.num_samples),
            kv_transfer=ReceiveKv(key, End.address),
        )
        first = msgspec.structs.replace(
            request,
            sampling=msgspec.structs.replace(sampling, max_tokens=1),
            media=tuple(media),
            kv_transfer=SendKv(key),
        )
        self.requests[name] = request
        legs = [(self.prefill, first), (self.decode, request)]
        for engine, leg in legs if rng.random() < 0.5 else legs[::-1]:
            engine.requests.submit(0, leg)

    def disturb(self) -> None:
        """Have a client leave, whole or from one sample, or the caches emptied."""
        if self.rng.random() < 0.06 and self.requests:
            name, index = self.rng.choice(list(self.requests)), self.rng.choice((None, 0, 1))
            if self.rng.random() < 0.5:
                self.decode.requests.abort(0, name, index)
            if self.rng.random() < 0.7:
                self.prefill.requests.abort(0, name, None)
        elif self.rng.random() < 0.02:
            self.rng.choice((self.prefill, self.decode)).scheduler.reset_caches(prefix=True, media=True)

    def step(self) -> None:
        """Do what the gateway and the wire do in one turn, and run a step of each engine that has work."""
        for name, request in self.requests.items():
            over = [self.ends.get((name, index)) for index in range(request.num_samples)]
            failed = FinishReason.ERROR in over or (None not in over and FinishReason.ABORT in over)
            if failed and name not in self._prefill_ended:
                self._prefill_ended.add(name)
                self.prefill.requests.abort(0, name, None)
        if self._wanted and self.rng.random() < 0.5:
            engine, name, places = self._wanted.pop(0)
            items = self.requests[name].media
            found = tuple(MediaPixels(place, inline=self.pixels[items[place].content_hash]) for place in places)
            engine.requests.supply(0, SupplyPixels(request_id=name, media=found))
        self.wire.turn()
        for engine in (self.prefill, self.decode):
            if engine.has_work:
                self._take(engine, engine.step())

    def _take(self, engine: Engine, frames: Mapping[int, StepFrame]) -> None:
        for frame in frames.values():
            self._wanted += [(engine, one.request_id, list(one.media)) for one in frame.pixels_wanted]
            for delta in frame.deltas if engine is self.decode else ():
                if delta.failure is not None:
                    for index in range(self.requests[delta.request_id].num_samples):
                        self.ends.setdefault((delta.request_id, index), FinishReason.ERROR)
                    continue
                sample = (delta.request_id, delta.index)
                assert sample not in self.ends, f"{sample} goes on behind its end"
                self.answers[sample] += delta.token_ids
                if delta.finish_reason is not None:
                    self.ends[sample] = delta.finish_reason

    @property
    def is_busy(self) -> bool:
        return bool(self.prefill.has_work or self.decode.has_work or self._wanted or not self.wire.is_idle)

    def run(self, num_steps: int = NUM_STEPS) -> None:
        """Send requests for *num_steps*, then run until nothing is left to do."""
        for number in range(MOST_STEPS):
            if number < num_steps:
                if self.rng.random() < 0.3:
                    self.submit()
                else:
                    self.disturb()
            self.step()
            if number >= num_steps and not self.is_busy:
                return

    def check(self) -> list[str]:
        """Return what is wrong at the end: state that is left, requests without an end, wrong answers."""
        wrong = [fault for executor in self.executors for fault in executor.faults]
        wrong += [] if self.wire.is_idle else [f"{len(self.wire.transfers)} transfers are left"]
        for role, engine in (("prefill", self.prefill), ("decode", self.decode)):
            load, plan = engine.load(), engine.scheduler
            left = {
                "work": engine.has_work,
                "running": load.num_running,
                "waiting": load.num_waiting,
                "sending": len(plan.sending),
                "receiving": len(plan.receiving),
                "blocks": load.num_blocks - load.num_free_blocks,
                "pins": len(plan.encoder_scheduler.encoder_cache.pins),
            }
            wrong += [f"{role}: {number} {what} left" for what, number in left.items() if number]
        for name, request in self.requests.items():
            room = MAX_MODEL_LEN - len(request.token_ids)
            expected = shadow.answer_alone(request, self.pixels)[:room]
            for index in range(request.num_samples):
                answer, end = self.answers[name, index], self.ends.get((name, index))
                is_whole = end in (FinishReason.STOP, FinishReason.LENGTH)
                if end is None:
                    wrong.append(f"{name}#{index} has no end")
                elif answer != (expected if is_whole else expected[: len(answer)]):
                    wrong.append(f"{name}#{index} ended by {end} with {answer}, not {expected}")
        return wrong


def num_answered(pair: Pair) -> int:
    """Return how many samples ended by themselves."""
    return sum(end in (FinishReason.STOP, FinishReason.LENGTH) for end in pair.ends.values())


def fuzz(seeds: range, failing: float = 0.0, **settings: Any) -> None:
    """Run a pair for each seed."""
    for seed in seeds:
        pair = Pair(seed, failing, **settings)
        pair.run()
        assert pair.check() == [], f"seed {seed}"
        assert num_answered(pair), f"seed {seed}"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_every_answer_is_the_one_computed_alone(steps_ahead: int) -> None:
    fuzz(range(6), num_samples=(1, 1, 2, 3), steps_ahead=steps_ahead)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_every_answer_is_right_while_transfers_steps_and_images_fail(steps_ahead: int) -> None:
    fuzz(range(100, 103), failing=0.03, num_samples=(1, 1, 2, 3), steps_ahead=steps_ahead)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_every_answer_is_right_if_only_the_last_window_is_sent(steps_ahead: int) -> None:
    fuzz(range(200, 203), num_samples=(1, 1, 2, 3), steps_ahead=steps_ahead, has_window=True)


@pytest.mark.conformance
@pytest.mark.parametrize("has_window", [False, True])
def test_every_answer_of_many_is_the_one_computed_alone(has_window: bool, share: Seeds) -> None:
    fresh = random.SystemRandom().randrange(10**9)
    for failing, steps_ahead in product((0.0, 0.03), (0, 1)):
        kind: dict[str, Any] = {"num_samples": (1, 1, 2, 3), "steps_ahead": steps_ahead, "has_window": has_window}
        fuzz(share(range(1000, 1030 if has_window else 1150)), failing, **kind)
        fuzz(share(range(fresh, fresh + 10)), failing, **kind)


@pytest.mark.parametrize(("max_num_seqs", "num_samples"), [(64, 2), (4, 2), (4, 3), (4, 4), (2, 2)])
def test_as_many_requests_of_several_samples_as_there_are_rows(max_num_seqs: int, num_samples: int) -> None:
    """Planned together, they once held every row with their first samples, and waited for the others for good."""
    pair = Pair(1, 0.0, (num_samples,), max_num_seqs)
    for _ in range(max_num_seqs):
        pair.submit()
    pair.run(num_steps=0)
    assert pair.check() == []
    assert num_answered(pair) == max_num_seqs * num_samples
