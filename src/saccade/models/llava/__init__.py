"""Declares the family of LLaVA-1.5 and LLaVA-NeXT."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    model_types=("llava", "llava_next"),
    placeholder="<image>",
    placeholder_keys=("image_token_index", "image_token_id"),
    image_tag="<image>\n",
    text_end_id=2,
    limits=(
        "Maintained only: faults are mended, nothing is added.",
        "Vision towers other than CLIP's are refused.",
        "Text networks other than Llama and Mistral are refused by the engine.",
        "The engine takes the features of one layer of the tower; a list in `vision_feature_layer` is refused.",
    ),
)
