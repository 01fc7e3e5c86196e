"""The interface of a model family: its declaration, and its parts in the gateway and in decode processes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saccade.errors import StartupError
from saccade.models.spec import PLACEHOLDER_TOKEN_ID
from saccade.protocol.media import ImageLayout, VideoHeader

ToolParser = Literal["auto", "none", "hermes", "qwen3_coder", "kimi_k2", "kimi_k3", "glm45", "gemma4"]
ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1", "kimi_k2", "kimi_k3", "glm45", "gemma4"]
"""The operator's choice: "auto" is the family's parser, "none" leaves calls and reasoning in the content."""


Detail = Literal["auto", "low", "high", "original"]
Purpose = Literal["chat", "documents", "boxes", "video"]
BoxCoordinates = Literal["thousandths", "thousandths_top_first", "pixels"]
"""What the numbers of a box count: thousandths of the image's sides, or pixels of the resized image.

They are left, top, right and bottom; with thousandths_top_first, top, left, bottom and right.
"""


class ReasoningTags(NamedTuple):
    """The special tokens around reasoning, and the text *header* that begins it."""

    begin: str
    end: str
    header: str = ""


THINK = ReasoningTags("<think>", "</think>")


class Release(NamedTuple):
    """A release to start with: its id on the hub, its size in billions of parameters, and what it is good for."""

    name: str
    billions: float
    purposes: tuple[Purpose, ...]


@dataclass(frozen=True)
class PageForm:
    """How a release reads a document page: its *prompt*, word for word, and the *markup* of its answers.

    "front_matter" is Markdown after a header, and "html_blocks" has an element for each block of the page. A page is
    rendered with at most *longest_side* pixels on its longest side. Box coordinates run from 0 to *box_scale* on both
    axes, or are image pixels if *box_scale* is None.
    """

    prompt: str
    markup: Literal["markdown", "front_matter", "html_blocks"] = "markdown"
    longest_side: int = 2048
    box_scale: int | None = None


@dataclass(frozen=True)
class Family:
    """The declaration of a family.

    *architectures* are the strings in config.json that identify the family; each belongs to exactly one family.
    *model_types* identify it if config.json has no architecture. *placeholder* is the token for an image in a prompt,
    or empty for models that read only text. Its id is under the first of *placeholder_keys* that config.json has, or
    else in the tokenizer's files. *template_mark* is the special token that templates write for an image, if it is not
    the placeholder; layouts then write the placeholders. *image_tag* is the text for image {number} in templates that
    take only strings; by default, it is the placeholder and a line break. *video_placeholder* is the token that is
    repeated for a video; None if videos are not served. With *split_at_images*, every stretch of text between images is
    tokenised separately, each with a BOS. *tiktoken_pattern* splits text before a tiktoken.model encodes it. *text_end*
    is the `eos_token` of the releases' tokenizer class, for files that name none. *text_end_id* is the `eos_token_id`
    of their text network's class, for folders in which no file names one. *template_switches* are the
    `chat_template_kwargs` of the releases' templates. *tool_format* names the form of the releases' tool calls, one of
    models.tool_formats; None if they were not trained for any. *reasoning* has the tokens around an answer's reasoning,
    and the header that the models write first, which nobody needs to see. *external_grid* is the name of an image's
    grid on external wires; without it, images cannot be sent over them. *plain_positions*: a token's position is its
    place in the prompt, whatever images come before it. *soft_token_budgets* are the token counts that
    `max_soft_tokens` may give an image; there are none if pixels alone decide. *keeps_alpha*: the family's Pixels get
    images with transparency as RGBA; other families' get them on white. *template* is the source of a chat template for
    releases that ship none. *ships_image_settings*: the releases include the settings of their image processor, so a
    folder without these is incomplete. *library* names the library whose classes compute the models of this family,
    which --model-impl chooses, and run their processors. Its Layout gets all files of the processor. Decode processes
    compute its layouts, and load the library only if a setting names it. *limits* are sentences for docs/models.md
    about what is not served. *page_forms*
    has the form of each release that reads documents, under a lower-case part of the release's name. *box_coordinates*
    are those of the boxes in the releases' answers; None if they were not trained for boxes. *releases* lists the ones
    to start with. *parts* names the family's own classes in a folder that several families share; any other
    part has the name of its interface.
    """

    architectures: tuple[str, ...]
    placeholder: str
    placeholder_keys: tuple[str, ...] = ("image_token_id",)
    model_types: tuple[str, ...] = ()
    template_mark: str | None = None
    image_tag: str | None = None
    video_placeholder: str | None = None
    split_at_images: bool = False
    tiktoken_pattern: str | None = None
    text_end: str | None = None
    text_end_id: int | None = None
    template_switches: tuple[str, ...] = ()
    tool_format: str | None = None
    reasoning: ReasoningTags = THINK
    external_grid: str | None = None
    plain_positions: bool = False
    soft_token_budgets: tuple[int, ...] = ()
    keeps_alpha: bool = False
    template: str | None = None
    ships_image_settings: bool = True
    library: str | None = None
    limits: tuple[str, ...] = ()
    page_forms: Mapping[str, PageForm] = field(default_factory=dict)
    box_coordinates: BoxCoordinates | None = None
    releases: tuple[Release, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_images(self) -> bool:
        """Whether the models take images, not only text."""
        return bool(self.placeholder)

    def placeholder_token_id(self, config: Mapping[str, Any]) -> int | None:
        """Return the placeholder's id in config.json, or None if it has none. Raises StartupError."""
        entries = ((key, config[key]) for key in self.placeholder_keys if config.get(key) is not None)
        key, token_id = next(entries, ("", None))
        if token_id is not None and (type(token_id) is not int or token_id < 0):
            raise StartupError(
                f"config.json: {key} is the id of {self.placeholder} and must be a whole number, not {token_id!r}."
            )
        return token_id

    def placeholder_below(self, config: Mapping[str, Any], vocab_size: int, default: int | None = None) -> int:
        """Return the placeholder's id from config.json, the tokenizer or else *default*. Raises StartupError."""
        stated = (self.placeholder_token_id(config), config.get(PLACEHOLDER_TOKEN_ID), default)
        token_id = next((one for one in stated if one is not None), None)
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            places = " or ".join(
                (*(f"`{key}` of config.json" for key in self.placeholder_keys), "the tokenizer's files")
            )
            raise StartupError(
                f"The id of {self.placeholder}, which stands for images, is {token_id!r}; it must be in {places}, and "
                f"below `vocab_size`, {vocab_size}."
            )
        return token_id


@dataclass(frozen=True)
class ImageOptions:
    """A request's options for its images: OpenAI's `detail`, vLLM's `mm_processor_kwargs`.

    *max_soft_tokens* is one of the family's budgets. If *resized_height* and *resized_width* are set, the image counts
    as one of that size in pixels.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_soft_tokens: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None


class Layout(Protocol):
    """The family's part in the gateway: it computes grids and token counts from dimensions. Does not import torch.

    `Layout(config, preprocessor)` takes the checkpoint's parsed files, and raises StartupError if they are wrong.
    """

    settings: Mapping[str, Any]
    """Resolved processor settings as JSON values: part of every image's identity, and the only input of `Pixels`."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None: ...

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue for an option that the family lacks."""

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the uint8 layout of an image of *width* x *height* pixels (EXIF applied). Raises ImageTooLarge."""

    def external(self, layout: ImageLayout, dtype: str) -> ImageLayout:
        """Return *layout* with the pixel_shape of external wires: normalised, with *dtype* "bfloat16" or "float32".

        Raises UnsupportedParameter if external wires have no format for the family's images.
        """


class Pixels(Protocol):
    """The family's part in decode processes, which turns an upright RGB image into the wire's patches."""

    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    def write_pixels(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the patches of *image* [height, width, 3] into *out*, which has layout.pixel_shape.

        If the family keeps alpha, *image* may have it as a fourth channel.

        *layout* is from Layout.image or Layout.external; *out* has its pixel_dtype, with uint16 for bfloat16.
        """

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the image [height, width, 3] that *patches* show, for display. *layout* is from Layout.image."""


class ProcessorPixels(Pixels, Protocol):
    """The same of a family that runs the checkpoint's own processor, which computes layouts too."""

    @staticmethod
    def load_library() -> None:
        """Import all classes of processors, because a confined process can import nothing."""

    @staticmethod
    def layout_of(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of an upright image of *width* x *height* pixels. *settings* are those of its Layout."""


@dataclass(frozen=True)
class FrameTimes:
    """Which frames a client has sampled: *indices* in a video of *num_frames*, at *fps*."""

    indices: tuple[int, ...] = ()
    num_frames: int | None = None
    fps: float | None = None


NO_TIMES = FrameTimes()


@dataclass(frozen=True)
class VideoOptions:
    """A request's options for its videos: vLLM's `media_io_kwargs` and `mm_processor_kwargs`.

    Either *num_frames* frames are sampled, or *fps* per second, which yields from *min_frames* to *max_frames*. All
    frames together have at most *total_pixels*. The other limits are numbers of pixels or tokens, as for images.
    *times* describes frames that the client has sampled. If *of_frame* names `min_pixels` or `max_pixels`, that limit
    holds for each frame, whatever the release's processor applies it to.
    """

    num_frames: int | None = None
    fps: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    times: FrameTimes = NO_TIMES
    max_soft_tokens: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    total_pixels: int | None = None
    of_frame: frozenset[str] = frozenset()


class VideoLayout(Protocol):
    """The video part in the gateway: it chooses frames, and computes their grid and tokens. Does not import torch.

    `VideoLayout(config, preprocessor, video_preprocessor)` takes the checkpoint's parsed files, and raises StartupError
    if they are wrong.
    """

    settings: Mapping[str, Any]
    """Resolved processor settings as JSON values: part of every video's identity, and the only input of VideoPixels."""

    template_tokens: ClassVar[tuple[str, ...]]
    """The special tokens that a template writes for a video, one after the other; its placeholders, or the `prompt` of
    its layout, take the place of all of them."""

    def __init__(
        self, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video_preprocessor: Mapping[str, Any]
    ) -> None: ...

    def settings_for(self, options: VideoOptions) -> Mapping[str, Any]:
        """Return `settings` changed by *options*. Raises InvalidValue."""

    def video(self, header: VideoHeader, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of a video, with the indices of its *frames*. Raises VideoTooLarge."""


class VideoPixels(Protocol):
    """The video part in decode processes, which turns upright RGB frames into the wire's patches."""

    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    def write_pixels(
        self, frames: Iterable[npt.NDArray[np.uint8]], layout: ImageLayout, out: npt.NDArray[np.uint8]
    ) -> None:
        """Write the patches of *frames*, the frames at layout.frames, into *out*, which has layout.pixel_shape."""
