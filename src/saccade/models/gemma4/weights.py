"""Maps checkpoint tensor names to the network's parameters."""

from saccade.models.backbones.names import FUSED, Fused, target_of
from saccade.models.network import Target

SOUND = ("model.audio_tower.", "model.embed_audio.")
"""Parts that are not served."""

TOWER = "model.vision_tower."
PREFIXES = (
    (TOWER, "visual."),
    ("model.vision_embedder.", "visual."),
    ("model.embed_vision.multimodal_embedder.", "visual."),
    ("model.embed_vision.", "visual."),
    ("model.", ""),
)
"""The releases' names, and those that transformers writes."""

PARTS: Fused = (
    (".router.", ".mixture.router.", None),
    (".post_feedforward_layernorm_", ".mixture.post_feedforward_layernorm_", None),
    (".pre_feedforward_layernorm_", ".mixture.pre_feedforward_layernorm_", None),
    (".per_layer_input_gate.", ".own.per_layer_input_gate.", None),
    (".per_layer_projection.", ".own.per_layer_projection.", None),
    (".post_per_layer_input_norm.", ".own.post_per_layer_input_norm.", None),
    *FUSED,
)
"""Parts of a layer that some models lack."""


def target(name: str) -> Target | None:
    """Return the target of the release's tensor *name*; None for audio tensors.

    In the tower, matrices are not fused, since each has its own bounds.
    """
    if name.startswith(SOUND):
        return None
    name = name.replace(".experts.", ".mixture.experts.")
    return target_of(name, PREFIXES, () if name.startswith(TOWER) else PARTS)
