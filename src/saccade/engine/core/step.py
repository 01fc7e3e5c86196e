"""An executor's input and output for one step. Every type here is immutable and serialisable.

A *row* is an index into the executor's buffers; each running sequence has one. A *sequence_id* identifies a sequence in
a row until the sequence ends or is preempted; the id is never reused. An *output_id* names the encoder output of one
image and is never reused either. Within a step an executor performs these actions in order: drop encoder outputs, end
and start rows, change block tables, restore and rewind states, receive KV state, encode, run the network, save states,
send KV state, sample.
"""

from collections.abc import Callable

import msgspec

from saccade.protocol.output import TokenLogprob
from saccade.protocol.request import SamplingParams

Grid = tuple[int, int, int]

GREEDY_BELOW = 1e-5
"""Temperatures below this value are greedy: a division by them would overflow."""


class EncoderInput(msgspec.Struct, frozen=True, array_like=True):
    """An image to encode."""

    output_id: int
    """Names the encoder output that is made."""
    modality: str
    grid: Grid
    """Patches as (frames, rows, columns)."""
    original_size: tuple[int, int] | None
    """The upright image's (height, width) in pixels, if the engine needs it."""
    pixels: bytes
    """uint8 patches of the grid, in the shape that the model's spec gives."""


class EncoderSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layers of the vision encoder to compute for an image that several steps encode."""

    output_id: int
    num_layers: int | None
    """The next ones; None for all that are left."""


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """The start of a sequence in a row."""

    row: int
    sequence_id: int
    sampling: SamplingParams
    position_delta: int
    """After the last image, a token's position is its index plus this."""


class TableChange(msgspec.Struct, frozen=True, array_like=True):
    """New entries of a row's block table. Entries after them do not change."""

    row: int
    start: int
    """The first entry that changes."""
    blocks: tuple[int, ...]
    """The entries from there on."""
    in_window: bool = False
    """Whether it is the table of the layers with a window. No token of this step or of a later one sees an entry of
    that table that was never sent."""


class MediaSlice(msgspec.Struct, frozen=True, array_like=True):
    """Features that replace the embeddings of a chunk's tokens."""

    offset: int
    """The first of these tokens, counted from the chunk's begin."""
    output_id: int
    start: int
    """The features are [start, stop) of the encoder output."""
    stop: int


class StateSave(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An instruction to copy a row's recurrent states to a checkpoint."""

    num_tokens: int
    """How many tokens of the chunk come before the states."""
    checkpoint: int


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a row's sequence to compute in this step."""

    row: int
    start: int
    """The tokens are [start, start + num_tokens) of the sequence."""
    num_tokens: int
    token_ids: tuple[int, ...] | None
    """None for the one token that was last sampled for this row."""
    positions: bytes = b""
    """int32 [3, num_tokens] in the machine's byte order; empty if every token's position is its index plus the row's
    position_delta."""
    media: tuple[MediaSlice, ...] = ()
    draws: bool = False
    """Whether the step samples a token after the last one."""
    num_proposed: int = 0
    """How many tokens at the end are proposals, which may be wrong: the step samples a token after each of them, and
    after the token before them."""
    saves: tuple[StateSave, ...] = ()
    """In order of their tokens."""

    @property
    def num_draws(self) -> int:
        return 1 + self.num_proposed if self.draws else 0


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """An instruction to copy recurrent states to a row."""

    row: int
    checkpoint: int
    """The number of the checkpoint, or of the row's kept state, to copy from."""


class KvSend(msgspec.Struct, frozen=True, array_like=True):
    """An instruction to copy a prompt's state to bytes in the step's output."""

    blocks: tuple[int, ...]
    row: int | None = None
    """The row whose recurrent states are copied, too."""
    window_blocks: tuple[int, ...] = ()
    """Blocks of layers with a window; they are copied after the others."""


class KvReceive(msgspec.Struct, frozen=True, array_like=True):
    """State that another engine computed, to write to blocks and a row."""

    blocks: tuple[int, ...]
    content: bytes
    """What a KvSend of as many blocks copied."""
    row: int | None = None
    """The row of the recurrent states that are, or end, the content."""
    window_blocks: tuple[int, ...] = ()


class StepInput(msgspec.Struct, frozen=True):
    """An executor's complete input for one step."""

    number: int
    drop: tuple[int, ...] = ()
    """Ids of encoder outputs; some may never have been made."""
    ended: tuple[int, ...] = ()
    """Rows whose sequences have left them."""
    started: tuple[RowStart, ...] = ()
    tables: tuple[TableChange, ...] = ()
    restore: tuple[StateMove, ...] = ()
    """Checkpoints for rows of *started*. The other started rows have zeroed recurrent states."""
    rewind: tuple[StateMove, ...] = ()
    """Rows that go back to a state that their last chunk kept. A chunk with proposals keeps the states after each of
    its tokens but the last, numbered by token."""
    images: tuple[EncoderInput, ...] = ()
    """Those to begin."""
    slices: tuple[EncoderSlice, ...] = ()
    """Of images that this step or an earlier one begins. The other *images* are encoded whole."""
    chunks: tuple[Chunk, ...] = ()
    """Those of a single token come first."""
    receive: tuple[KvReceive, ...] = ()
    send: tuple[KvSend, ...] = ()
    """This step or an earlier one has computed the state that these name."""
    drafts: tuple[int, ...] = ()
    """Numbers of draws after which drafts of further tokens may help. Networks with a draft layer make them."""

    @property
    def encoded(self) -> tuple[int, ...]:
        """The encoder outputs that are complete after this step."""
        ends = {one.output_id: one.num_layers is None for one in self.slices}
        begun = (image.output_id for image in self.images)
        return tuple(output_id for output_id in dict.fromkeys((*begun, *ends)) if ends.get(output_id, True))


class RowCounts(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of a row with penalties.

    They come with the row's first draw, and with the first draw after proposals. Executors add the tokens that they
    draw for the row.
    """

    row: int
    ids: bytes
    """int64, in the machine's byte order."""
    counts: bytes
    """int64: how often each id occurs in the answer."""


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens to score."""

    row: int
    offset: int
    """The first of them follows this token of the row's chunk, counted from the chunk's begin."""
    target_ids: tuple[int, ...]
    num_top: int
    """How many of the likeliest tokens are wanted at each place."""


class DrawMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a draw may have."""

    draw: int
    """The draw's number in the step."""
    bits: bytes
    """Bit i, little-endian, is set if token id i is allowed. As many bits as logits, rounded up to whole words of
    32."""


class SamplingInput(msgspec.Struct, frozen=True):
    """The parameters of a step's draws, which are numbered in the order of the chunks."""

    number: int
    uniforms: tuple[float, ...] = ()
    """A number in [0, 1) for each draw; empty if every row is greedy."""
    num_top: tuple[int | None, ...] = ()
    """For each draw, how many of the likeliest tokens are wanted in addition to the drawn one; None if its log
    probability is not wanted. Empty if no chunk wants any."""
    too_short: tuple[int, ...] = ()
    """Draws of answers that are below their minimum length."""
    counts: tuple[RowCounts, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()
    masks: tuple[DrawMask, ...] = ()
    """For draws of answers that follow a grammar, or whose reasoning must end."""


class NonFinite(msgspec.Struct, frozen=True, array_like=True):
    """A step's results that are NaN or infinite, and must never be used."""

    chunks: tuple[int, ...] = ()
    """Numbers of chunks: all results of their rows."""
    drafts: tuple[int, ...] = ()
    """Numbers of chunks whose entries in the draft layer are not finite: only their drafts."""
    encodings: tuple[int, ...] = ()
    """Images, by output_id."""


class StepOutput(msgspec.Struct, frozen=True):
    """The results of a step."""

    number: int
    token_ids: list[int] = []
    """One for each draw, in order."""
    logprobs: list[TokenLogprob | None] = []
    """One for each draw, None if it is not wanted; empty if no chunk wants any."""
    prompt_logprobs: list[list[TokenLogprob]] = []
    """Entry i belongs to the i-th PromptScores."""
    batch_seconds: float = 0.0
    encode_seconds: float = 0.0
    """The time that the step spent on images, a part of *network_seconds*."""
    network_seconds: float = 0.0
    failed_encodings: tuple[int, ...] = ()
    """Images that could not be encoded, by output_id. Results of rows that show them mean nothing."""
    sent: tuple[bytes, ...] = ()
    """Entry i is the content of the i-th KvSend."""
    drafts: list[tuple[int, ...]] = []
    """Entry i may follow the token of the i-th of the step's *drafts*; empty without a draft layer."""
    non_finite: NonFinite = NonFinite()
    """Results that mean nothing."""


def with_pixels(step: StepInput, change: Callable[[EncoderInput], bytes]) -> StepInput:
    """Return *step* with its images' pixels replaced."""
    replace = msgspec.structs.replace
    images = tuple(replace(image, pixels=change(image)) for image in step.images)
    return replace(step, images=images) if images else step
