"""The gateway's image part for models that take no images: it refuses every image. Does not import torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from saccade.errors import UnsupportedParameter
from saccade.models.family import ImageOptions
from saccade.protocol.media import ImageLayout

TEXT_ONLY = "This model reads text only; send the request to a model that takes images, or leave the image out."


class Layout:
    """Implements models.family.Layout, but refuses every image."""

    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        """Read nothing."""

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Raise UnsupportedParameter."""
        raise UnsupportedParameter(TEXT_ONLY)

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Raise UnsupportedParameter."""
        raise UnsupportedParameter(TEXT_ONLY)

    def external(self, layout: ImageLayout, dtype: str) -> ImageLayout:
        """Raise UnsupportedParameter."""
        raise UnsupportedParameter(TEXT_ONLY)
