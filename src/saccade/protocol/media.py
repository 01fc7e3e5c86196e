"""MediaItem: an image or video for the engine, and the values that describe it."""

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
    """The shape in which the model sees an image or video, computed from its header."""

    resized_height: int
    """Pixels."""
    resized_width: int
    """Pixels."""
    grid: tuple[int, int, int]
    """Patches as (frames, rows, columns)."""
    num_tokens: int
    """Placeholders in the prompt."""
    pixel_shape: tuple[int, ...]
    """Of the patches on the wire."""
    pixel_dtype: str = "uint8"
    """uint8, or on wires that are not ours float32 or bfloat16."""
    original_size: tuple[int, int] | None = None
    """The upright image's (height, width) in pixels, if the engine needs it."""
    prompt: tuple[str | int, ...] = ()
    """What replaces the image in the prompt: texts, each one special token or plain, and counts of placeholders, which
    add up to *num_tokens*. Empty without text."""
    frames: tuple[int, ...] = ()
    """Indices of a video's frames that the model sees; empty for an image."""
    seconds_per_group: float | None = None
    """The time from one group of a video's frames to the next."""
    stands_alone: bool = False
    """Whether the release's processor makes something else of the image if a request has others, too."""

    @property
    def num_pixel_bytes(self) -> int:
        """Size in bytes of the patches on the wire."""
        return math.prod(self.pixel_shape) * BYTES_PER_VALUE[self.pixel_dtype]


class VideoHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a video."""

    num_frames: int
    fps: float
    """Frames a second, on average."""
    width: int
    """Upright pixels, as *height*."""
    height: int
    indices: tuple[int, ...] = ()
    """If a client has sampled the frames, only these are there."""


class SlotRef(msgspec.Struct, frozen=True, kw_only=True):
    """The place of data, such as pixels, in shared memory."""

    name: str
    """The segment's."""
    generation: int
    """The number in the segment's header when the pixels were written."""
    nbytes: int
    """How many bytes of the segment are used."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image or video of a prompt. It may lack pixels if the worker is believed to hold its encoder output."""

    modality: str
    """"image" or "video"."""
    content_hash: bytes
    """32 bytes over the encoded bytes and the processor's fingerprint."""
    grid: tuple[int, int, int]
    """Patches as (frames, rows, columns)."""
    spans: tuple[Span, ...]
    """Its placeholders, in the order of the prompt and without overlap. An image has one span, or one for each view if
    the family writes text between views. A video has one, or one for each group of frames if times stand between
    them."""
    pixel_shape: tuple[int, ...]
    """As in ImageLayout, like *pixel_dtype*, *original_size* and *seconds_per_group*."""
    pixel_dtype: str = "uint8"
    original_size: tuple[int, int] | None = None
    seconds_per_group: float | None = None
    slot: SlotRef | None = None
    inline: bytes | None = None
