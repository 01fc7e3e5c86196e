"""Map names of checkpoint tensors to the network's parameters.

Releases name the parts `model.vision_model.`, `model.connector.modality_projection.proj.`, `model.text_model.` and
`lm_head.`.
"""

from saccade.models.backbones.clip_vision import FUSED
from saccade.models.backbones.llama_text import decoder_target
from saccade.models.network import Target

TEXT, HEAD = "text_model.", "lm_head."


def locate(name: str, loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None if the network does not need it.

    Not needed are the head unless *loads_head*, and the rotary frequencies that some files hold.
    """
    name = name.removeprefix("model.")
    if (not loads_head and name.startswith(HEAD)) or name.endswith(".rotary_emb.inv_freq"):
        return None
    if name.startswith((TEXT, HEAD)):
        return decoder_target(name.removeprefix(TEXT), "language_model")
    for part, partition in FUSED:
        if part in name:
            return Target(name.replace(part, "self_attn.qkv_proj."), partition)
    return Target(name)
