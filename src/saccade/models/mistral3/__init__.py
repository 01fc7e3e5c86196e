"""Mistral Small 3.1 and 3.2."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Mistral3ForConditionalGeneration",),
    model_types=("mistral3",),
    placeholder="[IMG]",
    placeholder_keys=("image_token_index", "image_token_id"),
    image_tag="[IMG]",
    plain_positions=True,
    limits=(
        "Text networks other than Mistral, such as Ministral 3's, are refused by the engine.",
        "A release in Mistral's own files alone (params.json, tekken.json) is refused: it lacks a tokenizer.json.",
    ),
)
