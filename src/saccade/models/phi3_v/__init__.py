"""Phi-3-vision and Phi-3.5-vision."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Phi3VForCausalLM",),
    model_types=("phi3_v",),
    placeholder="<|image|>",
    placeholder_keys=(),
    picture_tag="<|image_{number}|>\n",
    split_at_pictures=True,
    limits=(
        "Only the order `sub_glb` of features is served.",
        "Longrope's set of factors is chosen at load, by `--max-model-len`, and not for each request.",
    ),
)
