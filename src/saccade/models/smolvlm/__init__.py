"""Declares the family of Idefics3, SmolVLM and SmolVLM2."""

from saccade.models.family import Family, Release

FAMILY = Family(
    architectures=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    model_types=("idefics3", "smolvlm"),
    placeholder="<image>",
    image_tag="<image>",
    text_end_id=2,
    releases=(Release("HuggingFaceTB/SmolVLM-256M-Instruct", 0.26, ("chat",)),),
    limits=(
        "Text networks other than Llama are refused by the engine.",
        "Tiles of another size than the vision tower's images are refused.",
    ),
)
