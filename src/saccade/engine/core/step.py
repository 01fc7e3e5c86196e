"""A step as a value: the executor's input and output. Every type here is immutable and serialisable.

A *row* is an index into the executor's buffers; each running sequence has one. A *sequence_id* names one stay of a
sequence in a row, until the sequence ends or is preempted; the id is never reused. An *output_id* names the encoder
output of one image and is never reused either. Within a step an executor performs these actions in order: drop encoder
outputs, end and start rows, change block tables, restore and rewind states, receive KV state, encode, run the network,
save states, send KV state, sample.
"""

from collections.abc import Callable

import msgspec

from saccade.protocol.output import TokenLogprob
from saccade.protocol.request import SamplingParams

Grid = tuple[int, int, int]

GREEDY_BELOW = 1e-5
"""Temperatures below this value are greedy: a division by them would overflow."""


class EncoderInput(msgspec.Struct, frozen=True, array_like=True):
    """An image to encode. *pixels* are the uint8 patches of *grid*, in the shape that the model's spec gives."""

    output_id: int
    modality: str
    grid: Grid
    original_size: tuple[int, int] | None
    pixels: bytes


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence starts to occupy a row. After the last image, a token's position is index + *position_delta*."""

    row: int
    sequence_id: int
    sampling: SamplingParams
    position_delta: int


class TableChange(msgspec.Struct, frozen=True, array_like=True):
    """The row's block table is *blocks* from entry *start* on; entries after them do not change.

    It is that of layers that attend to all tokens; with *in_window*, that of layers with a window. No token of the step
    or of a later one sees an entry of the latter that was never sent.
    """

    row: int
    start: int
    blocks: tuple[int, ...]
    in_window: bool = False


class MediaSlice(msgspec.Struct, frozen=True, array_like=True):
    """Features [start, stop) of an encoder output replace the embeddings of the chunk's tokens from *offset* on."""

    offset: int
    output_id: int
    start: int
    stop: int


class StateSave(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A copy of a row's recurrent states, as they are after the first *num_tokens* of its chunk, to a checkpoint."""

    num_tokens: int
    checkpoint: int


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, start + num_tokens) of a row's sequence, to compute in this step.

    *token_ids* is None for the one token that was last sampled for this row. *positions* are int32 [3, num_tokens] in
    the machine's byte order; empty if every token's position is its index + the row's position_delta. With *draws*, the
    step samples a token after the last one. The last *num_proposed* tokens are proposals, which may be wrong: the step
    samples a token after each of them, and after the token before them. *saves* are in order of their tokens.
    """

    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    positions: bytes = b""
    media: tuple[MediaSlice, ...] = ()
    draws: bool = False
    num_proposed: int = 0
    saves: tuple[StateSave, ...] = ()

    @property
    def num_draws(self) -> int:
        return 1 + self.num_proposed if self.draws else 0


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a row's recurrent states from a checkpoint, or from the kept state of that number."""

    row: int
    checkpoint: int


class KvSend(msgspec.Struct, frozen=True, array_like=True):
    """A copy of *blocks*, and with *row* of that row's recurrent states, to bytes in the step's output.

    *window_blocks* are copied after *blocks*: those of layers with a window.
    """

    blocks: tuple[int, ...]
    row: int | None = None
    window_blocks: tuple[int, ...] = ()


class KvReceive(msgspec.Struct, frozen=True, array_like=True):
    """State that another engine computed: *content*, from a KvSend of as many blocks, is written to these blocks.

    With *row*, content is or ends with the recurrent states of that row.
    """

    blocks: tuple[int, ...]
    content: bytes
    row: int | None = None
    window_blocks: tuple[int, ...] = ()


class StepInput(msgspec.Struct, frozen=True):
    """The complete input of an executor for one step. *chunks* of a single token precede longer ones.

    *drop* may name outputs that were never made. *restore* initialises rows of *started* from checkpoints; the other
    started rows have zeroed recurrent states. *rewind* takes rows back to a state that their last chunk kept: one with
    proposals keeps, as number i, the states after each token i but the last. Earlier steps, or this one, must have
    computed the state that *send* names. *drafts* are the numbers of draws after which drafts of further tokens may
    help; networks with a draft layer make them.
    """

    number: int
    drop: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    started: tuple[RowStart, ...] = ()
    tables: tuple[TableChange, ...] = ()
    restore: tuple[StateMove, ...] = ()
    rewind: tuple[StateMove, ...] = ()
    images: tuple[EncoderInput, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    receive: tuple[KvReceive, ...] = ()
    send: tuple[KvSend, ...] = ()
    drafts: tuple[int, ...] = ()


class RowCounts(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a row with penalties: int64 *ids*, and int64 *counts*, how often each occurs in the answer.

    They come with the row's first draw, and with the first one after proposals. Executors add the tokens that they draw
    for the row.
    """

    row: int
    ids: bytes
    counts: bytes


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens *target_ids* to score, which follow the chunk's tokens from number *offset* on."""

    row: int
    offset: int
    target_ids: tuple[int, ...]
    num_top: int


class DrawMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that draw number *draw* of the step may have: bit i of *bits*, little-endian, is set for token id i.

    There are as many bits as logits, rounded up to whole words of 32 bits.
    """

    draw: int
    bits: bytes


class SamplingInput(msgspec.Struct, frozen=True):
    """The parameters of sampling. *uniforms* and *num_top* have an entry for each draw of the step, in order of chunks.

    *uniforms* are numbers in [0, 1); the list is empty if every row is greedy. *num_top* is the number of most likely
    tokens to return in addition to the drawn one, or None if its log probability is not requested; it is empty if no
    chunk requests any. *too_short* are the numbers of draws in answers that are below their minimum length. *masks* are
    for draws in answers that follow a grammar, or whose reasoning must end.
    """

    number: int
    uniforms: tuple[float, ...] = ()
    num_top: tuple[int | None, ...] = ()
    too_short: tuple[int, ...] = ()
    counts: tuple[RowCounts, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()
    masks: tuple[DrawMask, ...] = ()


class NonFinite(msgspec.Struct, frozen=True, array_like=True):
    """What a step computed that is NaN or infinite, and must not be used, now or later.

    *chunks* are numbers of chunks: all results of their rows. *drafts* are those of chunks whose entries in the draft
    layer are not finite: only drafts come of them. *encodings* are images, by encoder output id.
    """

    chunks: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    encodings: tuple[int, ...] = ()


class StepOutput(msgspec.Struct, frozen=True):
    """The result of a step: *token_ids* of its draws, in order, and their log probabilities.

    *logprobs* has None for a token without requested log probabilities, and is empty if no chunk requests any.
    prompt_logprobs[i] belongs to the i-th PromptScores. *encode_seconds* is the time of the step's images, a part of
    *network_seconds*. *failed_encodings* are images that could not be encoded; results of rows that show them are
    meaningless. sent[i] is the content of the i-th KvSend. drafts[i] may follow the token of the
    i-th of the step's *drafts*; without a draft layer there are none. Results that *non_finite* names are meaningless.
    """

    number: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    prompt_logprobs: list[list[TokenLogprob]] = []
    batch_seconds: float = 0.0
    encode_seconds: float = 0.0
    network_seconds: float = 0.0
    failed_encodings: tuple[int, ...] = ()
    sent: tuple[bytes, ...] = ()
    drafts: list[tuple[int, ...]] = []
    non_finite: NonFinite = NonFinite()


def with_pixels(step: StepInput, change: Callable[[EncoderInput], bytes]) -> StepInput:
    """Return *step* with other pixels of its images."""
    replace = msgspec.structs.replace
    images = tuple(replace(image, pixels=change(image)) for image in step.images)
    return replace(step, images=images) if images else step
