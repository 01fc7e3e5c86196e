"""Maps checkpoint tensor names to the network's parameters.

transformers names the parts `vision_tower.`, `multi_modal_projector.`, `language_model.` and `lm_head.`, now with
`model.` before the first three; the release's own form has `vision_model.`, `mlp1.` and `language_model.`.
"""

from saccade.models.backbones.names import FUSED, target_of
from saccade.models.network import Target

PREFIXES = (
    ("vision_tower.encoder.layer.", "vision_tower.layers."),
    ("vision_tower.embeddings.patch_embeddings.projection.", "vision_tower.embeddings.patch_embedding."),
    ("vision_tower.embeddings.cls_token", "vision_tower.embeddings.class_embedding"),
    ("vision_tower.embeddings.position_embeddings", "vision_tower.embeddings.position_embedding.weight"),
    ("multi_modal_projector.", "projector."),
    ("vision_model.embeddings.position_embedding", "vision_tower.embeddings.position_embedding.weight"),
    ("vision_model.encoder.layers.", "vision_tower.layers."),
    ("vision_model.", "vision_tower."),
    ("mlp1.0.", "projector.layer_norm."),
    ("mlp1.1.", "projector.linear_1."),
    ("mlp1.3.", "projector.linear_2."),
    ("language_model.model.", "language_model."),
    ("language_model.lm_head.", "lm_head."),
)
IN_TOWER = (
    (".attention.q_proj.", ".self_attn.qkv_proj.", 0),
    (".attention.k_proj.", ".self_attn.qkv_proj.", 1),
    (".attention.v_proj.", ".self_attn.qkv_proj.", 2),
    (".attention.projection_layer.", ".self_attn.out_proj.", None),
    (".layernorm_before.", ".layer_norm1.", None),
    (".layernorm_after.", ".layer_norm2.", None),
    (".attn.qkv.", ".self_attn.qkv_proj.", None),
    (".attn.proj.", ".self_attn.out_proj.", None),
    (".attention.", ".self_attn.", None),
    (".attn.", ".self_attn.", None),
    (".norm1.", ".layer_norm1.", None),
    (".norm2.", ".layer_norm2.", None),
    (".ls1", ".lambda_1", None),
    (".ls2", ".lambda_2", None),
)


def target(name: str) -> Target:
    """Return the target of the checkpoint tensor *name*."""
    name = name.removeprefix("model.")
    return target_of(name, PREFIXES, IN_TOWER if name.startswith(("vision_tower.", "vision_model.")) else FUSED)
