"""Gemma 4: the releases with a vision tower (26B-A4B, 31B, E2B, E4B), and the one without (12B)."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from saccade.models.family import Family, ReasoningTags

BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of tokens that the models were trained on: an image has the most that fit, of its own shape."""

GEMMA4 = Family(
    architectures=("Gemma4ForConditionalGeneration",),
    model_types=("gemma4",),
    placeholder="<|image|>",
    image_tag="<|image|>",
    video_placeholder="<|video|>",
    text_end_id=1,
    tool_format="gemma4",
    reasoning=ReasoningTags("<|channel>", "<channel|>", "thought\n"),
    template_switches=("enable_thinking",),
    plain_positions=True,
    soft_token_budgets=BUDGETS,
    # {"box_2d": [top, left, bottom, right]}: huggingface/blog, gemma4.md.
    box_coordinates="thousandths_top_first",
    limits=("Sound is not served: the layers for it are not loaded.",),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma4": GEMMA4,
        "gemma4_unified": replace(
            GEMMA4,
            architectures=("Gemma4UnifiedForConditionalGeneration",),
            model_types=("gemma4_unified",),
            parts={"Layout": "UnifiedLayout", "Spec": "UnifiedSpec", "Network": "UnifiedNetwork"},
        ),
    }
)
