"""Declares the Kimi-K2.5 family."""

from saccade.models.family import Family
from saccade.tokenization.han_words import PATTERN

FAMILY = Family(
    architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    model_types=("kimi_k25",),
    placeholder="<|media_pad|>",
    video_placeholder="<|media_pad|>",
    placeholder_keys=("media_placeholder_token_id", "image_token_id"),
    tiktoken_pattern=PATTERN,
    text_end="[EOS]",
    text_end_id=1,
    template_switches=("thinking",),
    tool_format="kimi_k2",
    external_grid="grid_thws",
    plain_positions=True,
)
