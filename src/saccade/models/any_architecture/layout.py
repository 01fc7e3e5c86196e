"""The settings of a checkpoint's own processor, which computes layouts in decode processes.

Does not import torch, and in a gateway not transformers either.
"""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.any_architecture import FAMILY
from saccade.models.family import ImageOptions
from saccade.models.preprocessing.own_wire import OwnWireLayout
from saccade.models.preprocessing.unserved_options import LIMITS, SIDES, refuse
from saccade.protocol.media import ImageLayout

NO_SETTINGS = frozenset({"image_processor_type", "processor_class", "auto_map", "image_processor", "video_processor"})
"""Keys of the processor's files that are no settings of the processor or the image processor itself."""

MARKS = ("image_placeholder_token", "boi_token", "image_token")
"""Settings that may name the text that a template writes for an image."""


class Layout(OwnWireLayout):
    """Implements models.family.Layout. *preprocessor* has what the processor is made from (models.files)."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        own, image, added = (preprocessor[key] for key in ("processor", "image_processor", "added_tokens"))
        placeholder = _placeholder(config, added)
        named = preprocessor["named_tokens"]
        marks = (source.get(name) for source in (own, named) for name in MARKS)
        mark = next((mark for mark in (*marks, FAMILY.placeholder) if mark in added), placeholder)
        self.settings: Mapping[str, Any] = {
            "placeholder": placeholder,
            "mark": mark,
            "added_tokens": added,
            "named_tokens": named,
            "processor": {key: value for key, value in own.items() if key not in NO_SETTINGS},
            "image_processor": {key: value for key, value in image.items() if key not in NO_SETTINGS},
            "processor_class": own.get("processor_class") or image.get("processor_class"),
            "image_processor_class": image.get("image_processor_type"),
            "model_type": str(config.get("model_type")),
        }

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings`. Raises InvalidValue for every option."""
        refuse(options, *LIMITS, *SIDES)
        return self.settings

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout of an image: its grid is (1, tokens, bytes), and its pixels are bytes of safetensors."""
        # A gateway asks a decode process instead, so that it does not load transformers.
        from saccade.models.any_architecture.pixels import Pixels

        return Pixels.layout_of(width, height, settings)


def _placeholder(config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> str:
    token_id = next((config[key] for key in FAMILY.placeholder_keys if config.get(key) is not None), None)
    placeholder = next((token for token, number in added_tokens.items() if number == token_id), None)
    if placeholder is None:
        raise StartupError(
            f"config.json: {' or '.join(FAMILY.placeholder_keys)} must be the id of the token that stands for images; "
            f"the tokenizer's files have no added token with the id {token_id!r}."
        )
    return placeholder
