"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `language_model.model.layers.`, `vision_tower.` and `mm_projector.`. For some of them,
transformers 5 writes `language_model.model.blocks.`, `vision_tower.encoder.patch_embed.` and `model.mm_projector.`.
"""

import re

from saccade.models.backbones.deepseek_config import DeepseekTextConfig
from saccade.models.backbones.names import target_of
from saccade.models.network import Target

PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.blocks.", "language_model.layers."),
    ("language_model.model.", "language_model."),
    ("vision_tower.encoder.patch_embed.pos_emb.", "visual.pos_embed."),
    ("vision_tower.patch_embed.pos_emb.", "visual.pos_embed."),
    ("vision_tower.encoder.", "visual."),
    ("vision_tower.", "visual."),
    ("mm_projector.pre_norm.", "visual.merger.norm."),
    ("mm_projector.proj.0.", "visual.merger.linear_fc1."),
    ("mm_projector.proj.2.", "visual.merger.linear_fc2."),
    ("mm_projector.", "visual.merger."),
)
IN_BLOCKS = (
    (".wqkv.", ".attn.qkv.", None),
    (".wo.", ".attn.proj.", None),
    (".norm0.", ".norm1.", None),
    (".norm1.", ".norm2.", None),
    (".mlp.fc0.", ".mlp.linear_fc1.", None),
    (".mlp.fc1.", ".mlp.linear_fc2.", None),
)
IN_DECODER = (
    (".self_attn.q_a_", ".self_attn.queries.q_a_", None),
    (".self_attn.q_b_proj.", ".self_attn.queries.q_proj.", None),
    (".self_attn.q_proj.", ".self_attn.queries.q_proj.", None),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)
LAYER = re.compile(r"language_model\.layers\.(\d+)\.")


def target(name: str, config: DeepseekTextConfig) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for draft layers."""
    name = name.removeprefix("model.")
    place = target_of(name, PREFIXES, IN_BLOCKS if name.startswith("vision_tower.") else IN_DECODER)
    layer = LAYER.match(place.parameter)
    is_draft = layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_draft_layers
    return None if is_draft else place
