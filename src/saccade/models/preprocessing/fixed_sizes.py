"""Layouts of images for models with fixed sizes of views, whose images no external wire takes. No torch."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import InvalidValue
from saccade.models.family import ImageOptions, VideoOptions
from saccade.models.preprocessing.own_wire import OwnWireLayout


class FixedSizeLayout(OwnWireLayout):
    """models.family.Layout. A family adds `image`; `low_detail` are the settings for `detail: low`."""

    settings: Mapping[str, Any]

    def low_detail(self) -> Mapping[str, Any]:
        """Return the settings that differ for `detail: low`."""
        raise NotImplementedError

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings`, changed for `detail: low`. Raises InvalidValue."""
        refuse_limits(options)
        changed = {**self.settings, **(self.low_detail() if options.detail == "low" else {})}
        return self.settings if changed == self.settings else changed


def refuse_limits(options: ImageOptions | VideoOptions) -> None:
    """Raise InvalidValue if *options* have limits of pixels."""
    for key in ("min_pixels", "max_pixels"):
        if getattr(options, key) is not None:
            raise InvalidValue(
                f"{key} is not supported: this model has fixed image sizes; leave it out.", "mm_processor_kwargs"
            )
