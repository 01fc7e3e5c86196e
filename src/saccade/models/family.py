"""What a model family declares about itself, and the halves it provides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from saccade.errors import StartupError
from saccade.protocol.media import PictureLayout


@dataclass(frozen=True)
class Family:
    """A family is claimed by the exact architecture strings of config.json; exactly one folder owns each.

    *model_types* claim a checkpoint whose config.json names no architecture. *placeholder* is the token that stands for
    a picture in a prompt; its id is that of the first of *placeholder_keys* that config.json has, else the tokenizer's.
    *picture_tag* is what stands for the picture with that {number} in templates that take only strings; without it the
    placeholder and a line break. With *split_at_pictures* every stretch of text between pictures is tokenised by
    itself, each with its BOS. *tiktoken_pattern* splits text before a tiktoken.model encodes it.
    *template_switches* are the `chat_template_kwargs` that the releases' templates know. *foreign_grid* is the name of
    a picture's grid on wires that are not ours; a family without one is not sent over them. *ships_image_settings* says
    that its releases come with the settings of their image processor, so that a folder without them has lost them.
    """

    architectures: tuple[str, ...]
    placeholder: str
    placeholder_keys: tuple[str, ...] = ("image_token_id",)
    model_types: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ("image",)
    picture_tag: str | None = None
    split_at_pictures: bool = False
    tiktoken_pattern: str | None = None
    template_switches: tuple[str, ...] = ()
    foreign_grid: str | None = None
    ships_image_settings: bool = True

    def placeholder_token_id(self, config: Mapping[str, Any]) -> int | None:
        """Return the placeholder's id as config.json gives it, None where it is silent. Raises StartupError."""
        given = ((key, config[key]) for key in self.placeholder_keys if config.get(key) is not None)
        key, token_id = next(given, ("", None))
        if token_id is not None and (type(token_id) is not int or token_id < 0):
            raise StartupError(
                f"config.json: {key} is the id of {self.placeholder} and must be a whole number, not {token_id!r}."
            )
        return token_id


@dataclass(frozen=True)
class PictureOptions:
    """What a request may set about how its pictures are seen: OpenAI's `detail`, vLLM's `mm_processor_kwargs`."""

    detail: Literal["auto", "low", "high"] = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


class Layout(Protocol):
    """The gateway's half: counts, from dimensions alone. No torch.

    Built from the checkpoint's parsed files: `Layout(config, preprocessor)`; raises StartupError where they are wrong.
    """

    settings: Mapping[str, Any]
    """Resolved processor settings as JSON values: part of every picture's identity, and all that `Pixels` is given."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None: ...

    def settings_for(self, options: PictureOptions) -> Mapping[str, Any]:
        """Return `settings` as *options* change them. Raises InvalidValue for one that this family cannot honour."""

    def picture(self, width: int, height: int, settings: Mapping[str, Any]) -> PictureLayout:
        """Return the layout of a picture of *width* x *height* pixels (EXIF applied), uint8. Raises ImageTooLarge."""

    def foreign(self, layout: PictureLayout, dtype: str) -> PictureLayout:
        """Return *layout* with the pixel_shape of wires that are not ours: normalised, as "bfloat16" or "float32".

        Raises UnsupportedParameter where the family is not sent over them.
        """


class Pixels(Protocol):
    """The decode process's half: an upright RGB picture to the patches of the wire."""

    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    def write(self, picture: npt.NDArray[np.uint8], layout: PictureLayout, out: npt.NDArray[Any]) -> None:
        """Write the patches of *picture* [height, width, 3] into *out*, which has layout.pixel_shape.

        *layout* is that of Layout.picture, or of Layout.foreign; *out* is of its pixel_dtype, bfloat16 as uint16.
        """

    def shown(self, patches: npt.NDArray[np.uint8], layout: PictureLayout) -> npt.NDArray[np.uint8]:
        """Return what *patches* of Layout.picture's *layout* show, as a picture [height, width, 3] for people."""
