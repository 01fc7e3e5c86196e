"""Map names of checkpoint tensors to the network's parameters."""

from collections.abc import Callable

from saccade.models.backbones.llama_text import decoder_target
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


def locate(name: str, tower: Callable[[str], Target | None], loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None if it is not needed.

    *tower* does the same for the vision tower's own names.
    """
    if name.startswith(TOWER):
        target = tower(name.removeprefix(TOWER))
        return target and target._replace(parameter=f"vision_tower.{target.parameter}")
    if name.startswith(EMBEDDING):
        own = name.removeprefix(EMBEDDING)
        return Target(OWN.get(own, own))
    if not loads_head and name == "lm_head.weight":
        return None
    return decoder_target(name, "language_model")
