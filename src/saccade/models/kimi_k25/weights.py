"""Map names of the release's checkpoint tensors to the network's parameters."""

import re

from saccade.models.backbones.deepseek_config import DeepseekTextConfig
from saccade.models.network import Target

PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "language_model."),
    ("vision_tower.encoder.", "vision_tower."),
    ("mm_projector.proj.0.", "mm_projector.linear_fc1."),
    ("mm_projector.proj.2.", "mm_projector.linear_fc2."),
)
RENAMED = (
    (".wqkv.", ".attn.qkv.", None),
    (".wo.", ".attn.proj.", None),
    (".self_attn.q_a_", ".self_attn.queries.q_a_", None),
    (".self_attn.q_b_proj.", ".self_attn.queries.q_proj.", None),
    (".self_attn.q_proj.", ".self_attn.queries.q_proj.", None),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)
EXPERT = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")
EXPERT_MATRICES = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}
LAYER = re.compile(r"language_model\.layers\.(\d+)\.")


def locate(name: str, config: DeepseekTextConfig, loads_head: bool) -> Target | None:
    """Return the target of the checkpoint tensor *name*.

    None for the head unless *loads_head*, for draft layers, and for rotary frequencies, which are computed.
    """
    for theirs, ours in PREFIXES:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    layer = LAYER.match(name)
    is_draft = layer is not None and 0 <= int(layer[1]) - config.num_layers < config.num_draft_layers
    if is_draft or name.endswith(".rotary_emb.inv_freq") or (not loads_head and name == "lm_head.weight"):
        return None
    if (match := EXPERT.fullmatch(name)) is not None:
        matrix, partition = EXPERT_MATRICES[match["matrix"]]
        return Target(f"{match['layer']}.{matrix}", partition, int(match["expert"]))
    for theirs, ours, partition in RENAMED:
        if theirs in name:
            return Target(name.replace(theirs, ours), partition)
    return Target(name)
