"""Layouts for images that no external wire takes, such as views of fixed sizes. Does not import torch."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import UnsupportedParameter
from saccade.models.family import ImageOptions
from saccade.models.preprocessing.unserved_options import LIMITS, SIDES, refuse
from saccade.protocol.media import ImageLayout


class OwnWireLayout:
    """Implements models.family.Layout's `external` for families whose images other workers' wires cannot carry."""

    def external(self, layout: ImageLayout, dtype: str) -> ImageLayout:
        """Raise UnsupportedParameter: external wires have no format for the family's images."""
        raise UnsupportedParameter(
            "This worker takes no images for this model: the wire to it has no format for them. Saccade's own "
            "workers take them."
        )


class FixedSizeLayout(OwnWireLayout):
    """Implements models.family.Layout. A family adds `image`, and `low_detail` with the settings for `detail: low`."""

    settings: Mapping[str, Any]

    def low_detail(self) -> Mapping[str, Any]:
        """Return the settings that differ for `detail: low`."""
        raise NotImplementedError

    def settings_for(self, options: ImageOptions) -> Mapping[str, Any]:
        """Return `settings`, changed if *options* ask for `detail: low`. Raises InvalidValue."""
        refuse(options, *LIMITS, *SIDES)
        changed = {**self.settings, **(self.low_detail() if options.detail == "low" else {})}
        return self.settings if changed == self.settings else changed
