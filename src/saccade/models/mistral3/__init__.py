"""Declares the family of Mistral Small 3.1 and 3.2, Ministral 3, and Devstral Small 2."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Mistral3ForConditionalGeneration",),
    model_types=("mistral3",),
    placeholder="[IMG]",
    placeholder_keys=("image_token_index", "image_token_id"),
    image_tag="[IMG]",
    text_end_id=2,
    plain_positions=True,
    limits=(
        "The engine refuses text networks other than Mistral's and Ministral 3's: Small 4 and Medium 3.5 have latents.",
        "A release in Mistral's own files alone (params.json, tekken.json) is refused: it lacks a tokenizer.json.",
    ),
)
