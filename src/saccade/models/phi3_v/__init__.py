"""Declares the family of Phi-3-vision and Phi-3.5-vision."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Phi3VForCausalLM",),
    model_types=("phi3_v",),
    placeholder="<|image|>",
    placeholder_keys=(),
    image_tag="<|image_{number}|>\n",
    split_at_images=True,
    text_end_id=32_000,
    limits=(
        "Maintained only: faults are mended, nothing is added.",
        "One set of longrope's factors serves all requests; `--max-model-len` chooses it at load.",
    ),
)
