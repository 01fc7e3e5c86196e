"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `visual.vision_model.`, `mlp_AR.`, `model.` and `lm_head.`; transformers writes
`model.visual.vision_model.`, `model.projector.` and `model.language_model.`.
"""

from saccade.models.backbones.names import FUSED, target_of
from saccade.models.network import Target

TOWER = "visual.vision_model."
BLOCKS = f"{TOWER}encoder.layers."
UNUSED = ("head.", "embeddings.packing_position_embedding.", "embeddings.position_ids")
"""Of the tower: a pooling head, and positions for another size."""

PREFIXES = (
    ("mlp_AR.", "visual.merger."),
    ("model.projector.", "visual.merger."),
    (BLOCKS, "visual.blocks."),
    (f"{TOWER}post_layernorm.", "visual.merger.post_layernorm."),
    (f"{TOWER}embeddings.position_embedding.", "visual.pos_embed."),
    (f"{TOWER}embeddings.patch_embedding.", "visual.patch_embed.proj."),
    ("model.language_model.", "language_model."),
    ("model.", "language_model."),
)
IN_BLOCKS = (
    (".self_attn.q_proj.", ".attn.qkv.", 0),
    (".self_attn.k_proj.", ".attn.qkv.", 1),
    (".self_attn.v_proj.", ".attn.qkv.", 2),
    (".self_attn.out_proj.", ".attn.proj.", None),
    (".layer_norm1.", ".norm1.", None),
    (".layer_norm2.", ".norm2.", None),
)
IN_PROJECTOR = (
    (".merger.pre_norm.", ".merger.norm.", None),
    (".merger.linear_1.", ".merger.linear_fc1.", None),
    (".merger.linear_2.", ".merger.linear_fc2.", None),
)


def target(name: str) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None if it is not needed."""
    name = name.replace(f"model.{TOWER}", TOWER)
    if name.removeprefix(TOWER).startswith(UNUSED):
        return None
    return target_of(name, PREFIXES, IN_BLOCKS if name.startswith(BLOCKS) else (*IN_PROJECTOR, *FUSED))
