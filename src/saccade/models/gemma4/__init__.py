"""Gemma 4: 26B-A4B, 31B, E2B and E4B."""

from saccade.models.family import Family, ReasoningTags

FAMILY = Family(
    architectures=("Gemma4ForConditionalGeneration",),
    model_types=("gemma4",),
    placeholder="<|image|>",
    image_tag="<|image|>",
    video_placeholder="<|video|>",
    tool_format="gemma4",
    reasoning=ReasoningTags("<|channel>", "<channel|>", "thought\n"),
    template_switches=("enable_thinking",),
    plain_positions=True,
    soft_token_budgets=(70, 140, 280, 560, 1120),
    limits=(
        "Sound is not served: the layers for it in E2B and E4B are not loaded.",
        "The 12B release (`Gemma4UnifiedForConditionalGeneration`), which has no vision tower, is not served.",
        "Layers with a window keep the keys and values of all tokens.",
    ),
)
