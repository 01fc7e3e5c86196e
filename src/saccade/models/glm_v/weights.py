"""Maps checkpoint tensor names to the network's parameters.

Releases name the parts `model.visual.`, `model.language_model.` and `lm_head.`; older ones leave `model.` out of the
first two.
"""

import re

from saccade.models.backbones.names import FUSED, target_of
from saccade.models.network import Target

VISUAL = "visual."
PREFIXES = (
    (f"{VISUAL}embeddings.position_embedding.", f"{VISUAL}pos_embed."),
    (f"{VISUAL}post_layernorm.", f"{VISUAL}merger.downsample.norm."),
    (f"{VISUAL}downsample.", f"{VISUAL}merger.downsample.proj."),
)
LAYER = re.compile(r"language_model\.layers\.(\d+)\.")


def target(name: str, num_layers: int) -> Target | None:
    """Return the target of the checkpoint tensor *name*; None for a layer after the last, which drafts tokens."""
    name = name.removeprefix("model.")
    layer = LAYER.match(name)
    if layer is not None and int(layer[1]) >= num_layers:
        return None
    return target_of(name, PREFIXES, FUSED)
