"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `language_model.model.`, `language_model.lm_head.`, `vision_tower.` and
`multi_modal_projector.`. transformers 5 writes `model.language_model.`, `lm_head.`, `model.vision_tower.` and
`model.multi_modal_projector.`.
"""

from saccade.models.backbones.names import FUSED, target_of
from saccade.models.network import Target

PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "language_model."),
    ("vision_tower.transformer.layers.", "visual.blocks."),
    ("vision_tower.patch_conv.", "visual.patch_embed.proj."),
    ("vision_tower.", "visual."),
    ("multi_modal_projector.patch_merger.", "visual.merger."),
    ("multi_modal_projector.", "visual.merger."),
)
IN_BLOCKS = (
    (".attention.q_proj.", ".attn.qkv.", 0),
    (".attention.k_proj.", ".attn.qkv.", 1),
    (".attention.v_proj.", ".attn.qkv.", 2),
    (".attention.o_proj.", ".attn.proj.", None),
    (".attention_norm.", ".norm1.", None),
    (".ffn_norm.", ".norm2.", None),
    (".feed_forward.gate_proj.", ".mlp.gate_up_proj.", 0),
    (".feed_forward.up_proj.", ".mlp.gate_up_proj.", 1),
    (".feed_forward.", ".mlp.", None),
)


def target(name: str) -> Target:
    """Return the target of the checkpoint tensor *name*."""
    return target_of(name.removeprefix("model."), PREFIXES, (*IN_BLOCKS, *FUSED))
