"""Gemma 3: the releases with a vision tower (4B, 12B, 27B)."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    placeholder="<image_soft_token>",
    placeholder_keys=("image_token_index", "image_token_id"),
    template_mark="<start_of_image>",
    image_tag="<start_of_image>",
    text_end_id=1,
    plain_positions=True,
    limits=("Pan and scan, which is off in the releases, is refused.",),
)
