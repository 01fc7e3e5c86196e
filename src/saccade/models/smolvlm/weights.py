"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `model.vision_model.`, `model.connector.modality_projection.proj.`, `model.text_model.` and
`lm_head.`.
"""

from saccade.models.backbones.names import target_of
from saccade.models.network import Target

PREFIXES = (
    ("text_model.", "language_model."),
    ("vision_model.encoder.", "vision_tower."),
    ("vision_model.", "vision_tower."),
    ("connector.modality_projection.", "projector."),
)


def target(name: str) -> Target:
    """Return the target of the checkpoint tensor *name*."""
    return target_of(name.removeprefix("model."), PREFIXES)
