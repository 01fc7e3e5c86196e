"""MediaItem: an image for the engine, and the values that describe it on the way there."""

import math

import msgspec

BYTES_PER_VALUE = {"uint8": 1, "bfloat16": 2, "float32": 4}
NUMPY_DTYPE = {"uint8": "uint8", "bfloat16": "uint16", "float32": "float32"}
"""The numpy type that holds the bits of a value; numpy has no bfloat16."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A run of placeholder tokens: token_ids[start : start + length]."""

    start: int
    length: int


class ImageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one image or video for the model, computed from its header.

    *grid* counts patches as (frames, rows, columns). *pixel_shape* and *pixel_dtype* describe the patches on the wire:
    uint8, or on wires that are not ours float32 or bfloat16. *original_size* is the upright image's (height, width), if
    the engine's half needs it. *prompt* replaces the image in the prompt: texts, each one special token or plain, and
    counts of placeholders, which add up to *num_tokens*; empty without text. *frames* are the indices of a video's
    frames that the model sees, *seconds_per_group* the time from one group of frames to the next; an image has neither.
    """

    resized_height: int
    resized_width: int
    grid: tuple[int, int, int]
    num_tokens: int
    pixel_shape: tuple[int, ...]
    pixel_dtype: str = "uint8"
    original_size: tuple[int, int] | None = None
    prompt: tuple[str | int, ...] = ()
    frames: tuple[int, ...] = ()
    seconds_per_group: float | None = None

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of the patches on the wire."""
        return math.prod(self.pixel_shape) * BYTES_PER_VALUE[self.pixel_dtype]


class VideoHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a video: *num_frames* at *fps* frames a second on average; *width* and *height* are upright.

    If a client has sampled its frames, it has only those with *indices*.
    """

    num_frames: int
    fps: float
    width: int
    height: int
    indices: tuple[int, ...] = ()


class SlotRef(msgspec.Struct, frozen=True, kw_only=True):
    """The place of pixels in shared memory: a segment's name, the generation in its header, the bytes used."""

    name: str
    generation: int
    nbytes: int


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image or video of a prompt.

    Pixels are in *slot* or *inline*; with neither, the worker is believed to hold the image.

    *spans* are in prompt order and do not overlap; their lengths sum to the item's token count. An image has one, or
    one per view in families that write text between its views. A video has one, or one per group of frames if the
    prompt has times between them. *seconds_per_group* is the time from one group to the next, if positions need it.
    *content_hash* is 32 bytes over encoded bytes and the processor's fingerprint.
    """

    modality: str
    content_hash: bytes
    grid: tuple[int, int, int]
    spans: tuple[Span, ...]
    pixel_shape: tuple[int, ...]
    pixel_dtype: str = "uint8"
    original_size: tuple[int, int] | None = None
    seconds_per_group: float | None = None
    slot: SlotRef | None = None
    inline: bytes | None = None
