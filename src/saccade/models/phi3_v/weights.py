"""Maps checkpoint tensor names to the network's parameters."""

from collections.abc import Callable

from saccade.models.backbones.names import target_of
from saccade.models.network import Target

EMBEDDING = "model.vision_embed_tokens."
TOWER = EMBEDDING + "img_processor."
OWN = {
    "sub_GN": "newline",
    "glb_GN": "separator",
    "img_projection.0.weight": "projector.linear_1.weight",
    "img_projection.0.bias": "projector.linear_1.bias",
    "img_projection.2.weight": "projector.linear_2.weight",
    "img_projection.2.bias": "projector.linear_2.bias",
    # The embedding of text is a part of the vision embedding too; some files hold it under this name.
    "wte.weight": "language_model.embed_tokens.weight",
}


def target(name: str, tower: Callable[[str], Target | None]) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None if it is not needed.

    *tower* does the same for the vision tower's own names.
    """
    if name.startswith(TOWER):
        place = tower(name.removeprefix(TOWER))
        return place and place._replace(parameter=f"vision_tower.{place.parameter}")
    if name.startswith(EMBEDDING):
        own = name.removeprefix(EMBEDDING)
        return Target(OWN.get(own, own))
    return target_of(name, (("model.", "language_model."),))
