"""Kimi-K2.5."""

from saccade.models.family import Family

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How the release's tokenization_kimi.py splits text: Chinese separately, then words by case, then digits by threes."""

FAMILY = Family(
    architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    model_types=("kimi_k25",),
    placeholder="<|media_pad|>",
    video_placeholder="<|media_pad|>",
    placeholder_keys=("media_placeholder_token_id", "image_token_id"),
    tiktoken_pattern=PATTERN,
    template_switches=("thinking",),
    tool_format="kimi_k2",
    external_grid="grid_thws",
    plain_positions=True,
)
