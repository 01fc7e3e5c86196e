"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `language_model.model.`, `vision_tower.vision_model.` and `multi_modal_projector.`. transformers
5 writes `model.language_model.`, `lm_head.`, `model.vision_tower.` and `model.multi_modal_projector.`.
"""

from saccade.models.backbones.names import target_of
from saccade.models.network import Target

PROJECTION = "multi_modal_projector.mm_input_projection_weight"
PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "language_model."),
    ("vision_tower.vision_model.encoder.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.encoder.", "vision_tower."),
    ("multi_modal_projector.mm_soft_emb_norm.", "projector.norm."),
)


def target(name: str) -> Target:
    """Return the target of the checkpoint tensor *name*."""
    name = name.removeprefix("model.")
    # A bare parameter, [inputs, outputs], unlike the matrix of a linear layer.
    return Target("projector.proj.weight", transposed=True) if name == PROJECTION else target_of(name, PREFIXES)
