"""Images that no external wire takes. No torch."""

from saccade.errors import UnsupportedParameter
from saccade.protocol.media import ImageLayout


class OwnWireLayout:
    """A part of models.family.Layout: `external`, for families whose images other workers' wires cannot carry."""

    def external(self, layout: ImageLayout, dtype: str) -> ImageLayout:
        """Raise UnsupportedParameter: external wires have no format for the family's images."""
        raise UnsupportedParameter(
            "This worker takes no images for this model: the wire to it has no format for them. Saccade's own "
            "workers take them."
        )
