"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `language_model.model.`, `language_model.lm_head.`, `vision_tower.vision_model.`,
`multi_modal_projector.` and `image_newline`. Later versions of transformers write `model.language_model.`, `lm_head.`,
`model.vision_tower.`, `model.multi_modal_projector.` and `model.image_newline`.
"""

from saccade.models.backbones.clip_vision import ClipTower
from saccade.models.backbones.names import target_of
from saccade.models.network import Target

TOWER = "vision_tower."
PREFIXES = (("language_model.lm_head.", "lm_head."), ("language_model.model.", "language_model."))


def target(name: str, tower: ClipTower) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for blocks of *tower* after the chosen features."""
    name = name.removeprefix("model.")
    if not name.startswith(TOWER):
        return target_of(name, PREFIXES)
    place = tower.locate(name.removeprefix(TOWER))
    return place and place._replace(parameter=TOWER + place.parameter)
