"""Declares the Kimi-K3 family, which has parts only for the gateway."""

from saccade.models.family import Family
from saccade.models.kimi_k3.template import TEMPLATE
from saccade.tokenization.han_words import PATTERN

FAMILY = Family(
    architectures=("KimiK3ForConditionalGeneration",),
    model_types=("kimi_k3",),
    placeholder="<|media_pad|>",
    placeholder_keys=("media_placeholder_token_id",),
    tiktoken_pattern=PATTERN,
    text_end="[EOS]",
    template_switches=("thinking", "thinking_effort", "tool_choice"),
    tool_format="kimi_k3",
    external_grid="grid_thws",
    plain_positions=True,
    keeps_alpha=True,
    template=TEMPLATE,
    limits=(
        "Saccade's engine does not run it; vLLM, SGLang and TokenSpeed do.",
        "Tool calls and JSON can be enforced; regular expressions, choices and grammars are refused. Reasoning has no "
        "budget.",
    ),
)
