"""A stand-in executor that keeps, in each cache slot, a digest of all that led to it, and checks every read.

With a window, it keeps the same digests in slots of the window's blocks. A token reads those that it sees, which must be
what its sequence wrote there, in blocks that were not given back.

A token is drawn from the digest of its context, so an answer can be computed alone by `answer_alone`: equal answers mean
that the core gave each row the right blocks, pixels and states, whatever happened to other requests meanwhile.
"""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts
from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.kv.window_blocks import WindowBlocks
from saccade.engine.core.schedule import Budgets
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Speculation
from saccade.engine.core.step import (
    Chunk,
    EncoderInput,
    KvReceive,
    SamplingInput,
    StepInput,
    StepOutput,
)
from saccade.models.positions import MultimodalPositions
from saccade.models.spec import most_window_blocks
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest

NUM_TEXT_IDS, PLACEHOLDER, VOCABULARY = 60, 66, 67
BLOCK_SIZE, LONGEST_IMAGE = 4, 6
NUM_LAYERS = 3
DIGEST_BYTES = 8
BLOCK_BYTES = BLOCK_SIZE * DIGEST_BYTES
NOTHING = b"\0" * DIGEST_BYTES


class StepFailed(Exception):
    """A step that the stand-in was to fail."""


def digest(before: bytes, token_id: int, pixel: tuple[bytes, int] | None) -> bytes:
    """Return the digest of a context that *token_id* follows; *pixel* is (pixels, offset) of a placeholder."""
    return blake2b(repr((before, token_id, pixel)).encode(), digest_size=DIGEST_BYTES).digest()


def drawn(context: bytes) -> int:
    """Return the token that follows a context."""
    return int.from_bytes(context, "little") % NUM_TEXT_IDS


def answer_alone(request: EngineRequest, pixels: Mapping[bytes, bytes]) -> list[int]:
    """Return the whole answer to *request*; *pixels* are those of its images by content hash."""
    seen = {
        span.start + offset: (pixels[item.content_hash], offset)
        for item in request.media
        for span in item.spans
        for offset in range(span.length)
    }
    context = b""
    for place, token_id in enumerate(request.token_ids):
        context = digest(context, token_id, seen.get(place))
    answer: list[int] = []
    while len(answer) < request.sampling.max_tokens:
        answer.append(drawn(context))
        if answer[-1] in request.sampling.stop_token_ids:
            break
        context = digest(context, answer[-1], None)
    return answer


@dataclass(frozen=True)
class Spec:
    """What the core knows of the model: images of four patches a token."""

    vocab_size: int = VOCABULARY
    max_position_embeddings: int = 512
    placeholder_of: Mapping[str, int] = field(default_factory=lambda: {"image": PLACEHOLDER})
    placeholder_token_ids: tuple[int, ...] = (PLACEHOLDER,)

    def item_tokens(self, grid: tuple[int, int, int], original_size: object = None) -> int:
        return grid[1] * grid[2] // 4

    def pixel_shape(self, grid: tuple[int, int, int], modality: str = "image") -> tuple[int, int]:
        return grid[1] * grid[2], 4

    def encode_cost(self, grid: tuple[int, int, int]) -> int:
        return grid[1] * grid[2]

    def encoder_output_values(self, grid: tuple[int, int, int], original_size: object = None) -> int:
        return 10 * grid[1] * grid[2]

    def span_lengths(self, grid: tuple[int, int, int], modality: str) -> None:
        return None

    def positions(self, media: object) -> MultimodalPositions:
        return MultimodalPositions([])


SPEC = Spec()


def image(kind: int, num_tokens: int, start: int) -> MediaItem:
    """Return an image of *num_tokens* whose placeholders begin at *start*; *kind* is the byte of all its pixels."""
    grid = (1, 2, 2 * num_tokens)
    return MediaItem(
        modality="image",
        content_hash=bytes([kind, num_tokens]) * 16,
        grid=grid,
        spans=(Span(start, num_tokens),),
        pixel_shape=(4 * num_tokens, 4),
        inline=bytes([kind]) * (16 * num_tokens),
    )


class ShadowExecutor:
    """Executes steps on digests. Of steps and images, *failing* is the share that fails; of drafts, *right* is right.

    *window_blocks* are the core's. With *whole_images*, no chunk may end inside an image.
    """

    def __init__(
        self,
        rng: random.Random,
        is_recurrent: bool,
        failing: float = 0.0,
        right: float = 0.0,
        window_blocks: WindowBlocks | None = None,
        whole_images: bool = False,
    ) -> None:
        # From a second source, so that a seed means the same failures with drafts and without.
        self._right, self._drafting = right, random.Random(0)
        self._rng = rng
        self._window_blocks = window_blocks
        self._whole_images = whole_images
        self._window_tables: dict[int, list[int]] = {}
        self._window_slots: dict[tuple[int, int], bytes] = {}
        self._is_recurrent = is_recurrent
        self._failing = failing
        self._tables: dict[int, list[int]] = {}
        self._slots: dict[tuple[int, int], bytes] = {}
        self._states: dict[int, bytes] = {}
        self._checkpoints: dict[int, bytes] = {}
        self._kept: dict[int, list[bytes]] = {}
        self._encoder_outputs: dict[int, bytes] = {}
        self._paused: dict[int, tuple[EncoderInput, int]] = {}
        self._last: dict[int, int] = {}
        self._outputs: deque[StepOutput | None] = deque()
        self._writers: deque[dict[tuple[bool, int], int]] = deque()
        self.num_launched_ahead = 0
        self.faults: list[str] = []

    def check_device(self) -> None:
        """A device that has not failed."""

    def close(self) -> None:
        """It holds no process."""

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        """Compute the tokens that follow the step's chunks. Raises StepFailed, now or when the step is collected.

        What a check finds is in *faults*, too: the engine goes on after any error.
        """
        try:
            self._launch(step, sampling)
        except (AssertionError, LookupError) as error:
            self.faults.append(repr(error))
            raise

    def _launch(self, step: StepInput, sampling: SamplingInput) -> None:
        assert sampling.number == step.number
        self._check_reuse(step)
        for output_id in step.drop:
            self._encoder_outputs.pop(output_id, None)
            self._paused.pop(output_id, None)
        for row in step.ended:
            self._tables.pop(row, None)
            self._last.pop(row, None)
        for start in step.started:
            assert start.row not in self._tables, "a row is started twice"
            self._tables[start.row], self._window_tables[start.row], self._states[start.row] = [], [], b""
        for change in step.tables:
            table = (self._window_tables if change.in_window else self._tables)[change.row]
            if change.in_window:
                table += [-1] * (change.start - len(table))
            assert change.start <= len(table), "a block table has a hole"
            table[change.start :] = change.blocks
        for move in step.restore:
            self._states[move.row] = self._checkpoints[move.checkpoint]
        for move in step.rewind:
            self._states[move.row] = self._kept[move.row][move.checkpoint]
        for receive in step.receive:
            self._receive(receive)
        failed = self._encode(step)
        self._attend(step)
        sent = tuple(
            _content(self._slots, send.blocks)
            + _content(self._window_slots, send.window_blocks)
            + (b"" if send.row is None else self._states[send.row])
            for send in step.send
        )
        fails = self._rng.random() < self._failing
        if fails and self._rng.random() < 0.5:
            raise StepFailed
        tokens, contexts = [], []
        for chunk in step.chunks:
            stop = chunk.start + chunk.num_tokens
            drawn_after = [self._context(chunk.row, place + 1) for place in range(stop - chunk.num_draws, stop)]
            draws = [drawn(context) for context in drawn_after]
            contexts += drawn_after
            tokens += draws
            # After proposals, the core tells which of the draws is the last token.
            self._last |= {chunk.row: draws[0]} if len(draws) == 1 else {chunk.row: -1}
        self.num_launched_ahead += bool(self._outputs)
        drafts = [self._draft(contexts[draw]) for draw in step.drafts]
        output = StepOutput(step.number, tokens, failed_encodings=failed, sent=sent, drafts=drafts)
        self._outputs.append(None if fails else output)
        groups = (
            [(False, self._tables)]
            if self._window_blocks is None
            else list(enumerate((self._tables, self._window_tables)))
        )
        self._writers.append(
            {
                (bool(in_window), tables[chunk.row][place // BLOCK_SIZE]): chunk.row
                for chunk in step.chunks
                for place in range(chunk.start, chunk.start + chunk.num_tokens)
                for in_window, tables in groups
            }
        )

    def _draft(self, context: bytes) -> tuple[int, ...]:
        """Return what may follow the token that is drawn from *context*."""
        drafts = []
        for _ in range(self._drafting.randint(0, 3)):
            context = digest(context, drawn(context), None)
            is_right = self._drafting.random() < self._right
            drafts.append(drawn(context) if is_right else self._drafting.randrange(NUM_TEXT_IDS))
        return tuple(drafts)

    def collect_output(self) -> StepOutput:
        """Return the output of the oldest step. Raises StepFailed."""
        self._writers.popleft()
        output = self._outputs.popleft()
        if output is None:
            raise StepFailed
        return output

    def _check_reuse(self, step: StepInput) -> None:
        """Check that no row ends, and no block goes to another row, while a step in flight writes it."""
        for writers in self._writers:
            assert not set(step.ended) & set(writers.values()), "a row ends while a step computes it"
            for change in step.tables:
                owners = {writers.get((change.in_window, block), change.row) for block in change.blocks}
                assert owners == {change.row}, "a block is reused while a step writes it"

    def _context(self, row: int, num_tokens: int) -> bytes:
        place = num_tokens - 1
        return self._slots[self._tables[row][place // BLOCK_SIZE], place % BLOCK_SIZE] if num_tokens else b""

    def _receive(self, receive: KvReceive) -> None:
        content = receive.content
        for slots, blocks in ((self._slots, receive.blocks), (self._window_slots, receive.window_blocks)):
            for block in blocks:
                for place in range(BLOCK_SIZE):
                    slots[block, place], content = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if receive.row is not None:
            self._states[receive.row] = content

    def _encode(self, step: StepInput) -> tuple[int, ...]:
        cut = {part.output_id for part in step.slices}
        whole = [image for image in step.images if image.output_id not in cut]
        for image in step.images:
            if image.output_id in cut:
                self._paused[image.output_id] = (image, NUM_LAYERS)
        for part in step.slices:
            image, num_left = self._paused.pop(part.output_id)
            assert part.num_layers is None or 0 < part.num_layers < num_left, "more layers than are left"
            if part.num_layers is None:
                whole.append(image)
            else:
                self._paused[part.output_id] = image, num_left - part.num_layers
        failed = []
        for image in whole:
            is_failed = self._rng.random() < self._failing
            self._keep(image, b"failed" if is_failed else bytes(image.pixels))
            failed += [image.output_id] * is_failed
        return tuple(failed)

    def _keep(self, image: EncoderInput, output: bytes) -> None:
        assert image.output_id not in self._encoder_outputs, "an image is encoded twice"
        self._encoder_outputs[image.output_id] = output

    def _attend(self, step: StepInput) -> None:
        written: dict[tuple[int, int], bytes] = {}
        rows = [chunk.row for chunk in step.chunks]
        assert len(rows) == len(set(rows)), "a row has two chunks"
        lengths = [chunk.num_tokens > 1 for chunk in step.chunks]
        assert lengths == sorted(lengths), "a chunk of one token comes after a longer one"
        for chunk in step.chunks:
            context = self._context(chunk.row, chunk.start)
            assert not self._is_recurrent or self._states[chunk.row] == context, "a state is not that of its context"
            kept, saves = [], {save.num_tokens: save.checkpoint for save in chunk.saves}
            for place, (token_id, pixel) in enumerate(self._inputs(chunk), chunk.start):
                context = digest(context, token_id, pixel)
                if self._window_blocks is not None:
                    self._attend_in_window(self._window_blocks, chunk.row, place, context)
                slot = (self._tables[chunk.row][place // BLOCK_SIZE], place % BLOCK_SIZE)
                assert written.setdefault(slot, context) == context, "two rows write one slot"
                self._slots[slot] = context
                kept.append(context)
                if (checkpoint := saves.pop(len(kept), None)) is not None:
                    self._checkpoints[checkpoint] = context
            assert not saves, "a state is saved after more tokens than there are"
            self._states[chunk.row] = context
            self._kept[chunk.row] = kept[:-1] if chunk.num_proposed else []

    def _attend_in_window(self, blocks: WindowBlocks, row: int, place: int, context: bytes) -> None:
        """Read what token *place* sees of its sequence, and write its own digest."""
        table = self._window_tables[row]
        for seen in range(max(0, place - blocks.window + 1), place):
            block = table[seen // BLOCK_SIZE]
            assert blocks.references[block] > 0, "a block that is read was given back"
            found = self._window_slots[block, seen % BLOCK_SIZE]
            assert found == self._context(row, seen + 1), "a block that is read was used again"
        block = table[place // BLOCK_SIZE]
        assert blocks.references[block] > 0, "a block that is written was given back"
        self._window_slots[block, place % BLOCK_SIZE] = context

    def _inputs(self, chunk: Chunk) -> list[tuple[int, tuple[bytes, int] | None]]:
        """Return token ids of a chunk with the pixels behind its placeholders."""
        token_ids = [self._last[chunk.row]] if chunk.token_ids is None else list(chunk.token_ids)
        assert len(token_ids) == chunk.num_tokens
        seen = {
            piece.offset + number: (self._encoder_outputs[piece.output_id], start)
            for piece in chunk.media
            for number, start in enumerate(range(piece.start, piece.stop))
        }
        for piece in chunk.media if self._whole_images else ():
            output = self._encoder_outputs[piece.output_id]
            assert output == b"failed" or len(output) == 16 * piece.stop, "a chunk ends inside an image"
        places = {place for place, token_id in enumerate(token_ids) if token_id == PLACEHOLDER}
        assert places == set(seen), "placeholders and features do not match"
        return [(token_id, seen.get(place)) for place, token_id in enumerate(token_ids)]


def _content(slots: Mapping[tuple[int, int], bytes], blocks: tuple[int, ...]) -> bytes:
    return b"".join(slots.get((block, place), NOTHING) for block in blocks for place in range(BLOCK_SIZE))


class ScriptedProposer:
    """Proposes what will be drawn, each token with the probability *right*, else any; also tokens after the end."""

    def __init__(self, rng: random.Random, right: float, pixels: Mapping[bytes, bytes]) -> None:
        self._rng, self._right, self._pixels = rng, right, pixels
        self._answers: dict[tuple[int, str], list[int]] = {}

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        key = (sequence.connection, sequence.request_id)
        if key not in self._answers:
            self._answers[key] = answer_alone(sequence.request, self._pixels)
        rest = [*self._answers[key][sequence.num_generated_tokens :], *([7] * most)]
        rng = self._rng
        return [
            token_id if rng.random() < self._right else rng.randrange(NUM_TEXT_IDS)
            for token_id in rest[: rng.randint(0, most)]
        ]


def scheduler(
    rng: random.Random,
    is_recurrent: bool,
    max_num_seqs: int,
    num_blocks: int,
    num_tokens: int | None = None,
    *,
    num_patches: int = 64,
    max_num_waiting: int = 200,
    encoder_cache_bytes: int = 10**6,
    speculation: Speculation | None = None,
    window: int | None = None,
    whole_images: bool = False,
) -> Scheduler:
    """Return a scheduler of small random pools, whose steps have at most *num_tokens*; None: few, by chance.

    With a *window*, its blocks are as few as may be, or more.
    """
    caches = rng.random() < 0.8
    checkpoints = None
    if is_recurrent:
        checkpoints = StateCheckpoints(rng.choice([1, 4, 16]) if caches else 0, BLOCK_SIZE, 2)
    window_blocks = None
    if window is not None:
        longest = LONGEST_IMAGE if whole_images else 0
        least = min(num_blocks, 2 * most_window_blocks(window, BLOCK_SIZE, longest))
        count = rng.choice((least, rng.randint(least, num_blocks)))
        window_blocks = WindowBlocks(count, BLOCK_SIZE, window, longest)
    return Scheduler(
        Budgets(
            max_num_seqs,
            num_tokens or rng.randint(max(4, max_num_seqs), max(60, max_num_seqs)),
            num_patches,
            max_num_waiting,
            whole_images,
        ),
        BlockManager(PagedBlocks(num_blocks, BLOCK_SIZE), checkpoints, caches, window_blocks),
        EncoderCache(encoder_cache_bytes),
        EncodeCosts(SPEC.encode_cost, SPEC.encoder_output_values, NUM_LAYERS),
        speculation,
    )


def without_pixels(items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """Return the items as they go by their hash alone."""
    return tuple(msgspec.structs.replace(item, inline=None) for item in items)
