"""Map names of checkpoint tensors to the network's parameters.

Releases name the parts `language_model.model.`, `language_model.lm_head.`, `vision_tower.vision_model.`,
`multi_modal_projector.` and `image_newline`. Later versions of transformers write `model.language_model.`, `lm_head.`,
`model.vision_tower.`, `model.multi_modal_projector.` and `model.image_newline`.
"""

from saccade.models.backbones.clip_vision import ClipTower
from saccade.models.backbones.llama_text import decoder_target
from saccade.models.network import Target

TOWER, TEXT, HEAD = "vision_tower.", "language_model.", "lm_head."


def locate(name: str, tower: ClipTower, loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for a tensor that is not needed.

    Not needed are the blocks of *tower* after the chosen features, the head unless *loads_head*, and the rotary
    frequencies that old releases hold.
    """
    name = name.removeprefix("model.")
    if name.startswith(TOWER):
        target = tower.locate(name.removeprefix(TOWER))
        return None if target is None else Target(TOWER + target.parameter, target.partition)
    if not name.startswith((TEXT, HEAD)):
        return Target(name)
    name = name.removeprefix(TEXT)
    if (not loads_head and name.startswith(HEAD)) or name.endswith(".rotary_emb.inv_freq"):
        return None
    return decoder_target(name, TEXT.removesuffix("."))
