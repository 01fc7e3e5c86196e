"""LLaVA-1.5 and LLaVA-NeXT."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    model_types=("llava", "llava_next"),
    placeholder="<image>",
    placeholder_keys=("image_token_index", "image_token_id"),
    picture_tag="<image>\n",
)
