"""An image's life: whole requests in any order of events, with an executor on paper."""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import pytest
import scheduling
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import FEATURE_BYTES, check_holdings, paged

from saccade.engine.core.images import RequestImage
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.loop import Engine
from saccade.errors import WorkerFailed
from saccade.models.positions import MultimodalPositions
from saccade.models.spec import Grid, KvSpec, Positions
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.media import MediaItem, SlotRef, Span
from saccade.protocol.request import EngineRequest, MediaPixels, SamplingParams, SupplyPixels
from saccade.transport.shared_memory import SlotPool, open_slot

PLACEHOLDER = 7
DEAD = SlotRef(name="saccade-1-1-0123456789abcdef", generation=1, nbytes=8)


def test_a_slot_that_cannot_be_read_is_given_up_once() -> None:
    item = MediaItem(
        modality="image", content_hash=bytes(32), grid=(1, 2, 4), spans=(Span(0, 2),), pixel_shape=(8, 1), slot=DEAD
    )
    image, names = RequestImage(item, b"", "media[3]"), list[str]()
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="image") as failure:
            image.read_patches(names)
        assert failure.value.param == "media[3]"
    assert not image.has_pixels
    image.release(names)
    assert names == [DEAD.name]


class Spec:
    """A model whose images have 4 patches of one byte a token."""

    kv_specs: tuple[KvSpec, ...] = ()
    vocab_size = 8
    max_position_embeddings = 60
    placeholder_of: Mapping[str, int] = {"image": PLACEHOLDER}
    placeholder_token_ids = (PLACEHOLDER,)

    def item_tokens(self, grid: Grid, original_size: tuple[int, int] | None = None) -> int:
        return grid[1] * grid[2] // 4

    def pixel_shape(self, grid: Grid, modality: str = "image") -> tuple[int, int]:
        return grid[1] * grid[2], 1

    def encode_cost(self, grid: Grid) -> int:
        return grid[1] * grid[2]

    def encoder_output_values(self, grid: Grid, original_size: tuple[int, int] | None = None) -> int:
        return FEATURE_BYTES

    def square_grid(self, max_patches: int) -> Grid:
        return (1, 2, 2)

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...]:
        return (self.item_tokens(grid),)

    def positions(self, media: Any) -> Positions:
        return MultimodalPositions([])


class PaperExecutor:
    """Computes nothing, and looks whether each image that a chunk shows is encoded, from the right pixels.

    *faults* is what is wrong: the engine would take an exception for a step that failed.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.held: set[int] = set()
        self.outputs: deque[StepOutput] = deque()
        self.fails = False

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        self.held.difference_update(step.drop)
        self.faults += ["wrong pixels" for image in step.images if set(image.pixels) != {image.grid[2]}]
        if not self.fails:
            self.held.update(image.output_id for image in step.images)
        if self.fails:
            raise RuntimeError("on paper")
        shown = {slice_.output_id for chunk in step.chunks for slice_ in chunk.media}
        self.faults += ["a chunk shows what is not encoded" for output_id in shown if output_id not in self.held]
        self.outputs.append(StepOutput(step.number, [1 for chunk in step.chunks if chunk.draws]))

    def collect_output(self) -> StepOutput:
        return self.outputs.popleft()

    def check_device(self) -> None:
        pass


MEDIA = st.tuples(st.integers(1, 3), st.sampled_from(("hash", "inline", "slot", "dead")))
PARTS = st.lists(st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=9), MEDIA), min_size=1, max_size=4)
"""Images of as many tokens have the same content, so that encoder outputs are shared often."""


class Machine(RuleBasedStateMachine):
    """Requests come, are answered, wait for pixels, get them, end in every way; whatever can fail does."""  # [eng] 17, 26

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(1 << 22)
        self.lent: dict[str, int] = {}
        self.released: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.num_requests = 0
        self.open: dict[str, tuple[int, EngineRequest]] = {}
        self.wanted: dict[str, list[int]] = {}

    @initialize(
        num_blocks=st.integers(16, 24),
        seqs=st.integers(1, 4),
        tokens=st.integers(4, 24),
        patches=st.integers(1, 30),
        cache=st.sampled_from((0, FEATURE_BYTES, 10 * FEATURE_BYTES)),
        steps_ahead=st.integers(0, 1),
    )
    def start(self, num_blocks: int, seqs: int, tokens: int, patches: int, cache: int, steps_ahead: int) -> None:
        self.executor = PaperExecutor()
        scheduler = scheduling.scheduler(num_blocks, seqs, tokens, patches, encoder_cache_bytes=cache)
        description = Description(
            model="paper", fingerprint=bytes(32), files=ModelFiles(files={}), max_model_len=60, max_num_seqs=seqs,
            block_size=scheduling.BLOCK, num_blocks=num_blocks, dtype="paper", device="paper", shm_namespace="",
            version="",
        )  # fmt: skip
        validator = RequestValidator(Spec(), bytes(32), 60)
        self.engine = Engine(self.executor, scheduler, validator, description, steps_ahead=steps_ahead)

    def slot(self, connection: int, content: bytes) -> SlotRef:
        slot = self.pool.acquire(len(content))
        assert slot is not None
        with open_slot(slot.ref) as view:
            view[:] = content
        self.lent[slot.ref.name] = connection
        return slot.ref

    @rule(parts=PARTS, connection=st.integers(0, 1), num_samples=st.integers(1, 3), max_tokens=st.integers(1, 5))
    def arrive(self, parts: list[Any], connection: int, num_samples: int, max_tokens: int) -> None:
        token_ids: list[int] = []
        media: list[MediaItem] = []
        self.num_requests += 1
        for part in parts:
            if isinstance(part, list):
                token_ids += part
                continue
            tokens, how = part
            content = bytes([2 * tokens]) * 4 * tokens
            slot = None
            if how == "slot":
                slot = self.slot(connection, content)
            elif how == "dead":
                slot = SlotRef(name=f"saccade-1-1-{len(self.lent):016x}", generation=1, nbytes=len(content))
                self.lent[slot.name] = connection
            media.append(
                MediaItem(
                    modality="image",
                    content_hash=bytes([tokens]) * 32,
                    grid=(1, 2, 2 * tokens),
                    spans=(Span(len(token_ids), tokens),),
                    pixel_shape=(4 * tokens, 1),
                    inline=content if how == "inline" else None,
                    slot=slot,
                )
            )
            token_ids += [PLACEHOLDER] * tokens
        request = EngineRequest(
            request_id=str(self.num_requests),
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
            media=tuple(media),
            num_samples=num_samples,
        )
        self.open[request.request_id] = connection, request
        self.engine.requests.submit(connection, request)

    @precondition(lambda self: self.wanted)
    @rule(which=st.integers(0, 99), how=st.sampled_from(("inline", "slot", "wrong")))
    def answer(self, which: int, how: str) -> None:
        request_id = sorted(self.wanted)[which % len(self.wanted)]
        connection, request = self.open[request_id]
        media = []
        for index in self.wanted.pop(request_id):
            content = bytes([request.media[index].grid[2]]) * request.media[index].pixel_shape[0]
            if how == "slot":
                media.append(MediaPixels(index, slot=self.slot(connection, content)))
            else:
                media.append(MediaPixels(index, inline=content[how == "wrong" :]))
        self.engine.requests.supply(connection, SupplyPixels(request_id=request_id, media=tuple(media)))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), index=st.one_of(st.none(), st.integers(0, 2)))
    def abort(self, which: int, index: int | None) -> None:
        request_id = sorted(self.open)[which % len(self.open)]
        self.engine.requests.abort(self.open[request_id][0], request_id, index)

    @rule(connection=st.integers(0, 1))
    def hang_up(self, connection: int) -> None:
        self.engine.requests.hangup(connection)
        mine = {request_id for request_id, (owner, _) in self.open.items() if owner == connection}
        self.wanted = {name: media for name, media in self.wanted.items() if name not in mine}
        self.gone.update(name for name, owner in self.lent.items() if owner == connection)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        idle = [one for one in self.engine.scheduler.running if not one.num_steps_in_flight]
        for sequence in idle[which % len(idle) :][:1] if idle else ():
            self.engine.scheduler.preempt(sequence)

    @rule(prefix=st.booleans(), media=st.booleans())
    def forget(self, prefix: bool, media: bool) -> None:
        self.engine.scheduler.reset_caches(prefix=prefix, media=media)

    @rule(steps=st.integers(1, 3), fails=st.sampled_from((False, False, False, True)))
    def work(self, steps: int, fails: bool) -> None:
        self.executor.fails = fails
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        for frame in self.engine.step().values():
            self.released.update(frame.released)
            self.wanted.update((wanted.request_id, wanted.media) for wanted in frame.pixels_wanted)
        assert not self.released - Counter(self.lent.keys()), "a slot is given up twice"

    @invariant()
    def holdings_are_those_of_the_unfinished(self) -> None:
        if hasattr(self, "engine"):
            check_holdings(self.engine.scheduler)
            assert not self.executor.faults

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.end()
        finally:
            self.pool.close()

    def end(self) -> None:
        """Answer every question, let everything end, and look at what is left."""
        self.executor.fails = False
        for _ in range(3000):
            for request_id in list(self.wanted):
                self.answer(sorted(self.wanted).index(request_id), "inline")
            if not self.engine.has_work and not self.wanted:
                break
            self.step()
        load, cache = self.engine.load(), self.engine.scheduler.encoder_scheduler.encoder_cache
        assert (load.num_running, load.num_waiting) == (0, 0), "livelock"
        assert paged(self.engine.scheduler).num_free_blocks == load.num_blocks
        assert not cache.pins
        assert self.lent.keys() - self.gone <= self.released.keys(), "a slot is not given up"
        self.engine.scheduler.reset_caches(prefix=True, media=True)
        self.step()
        assert (len(cache), self.executor.held) == (0, set())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
