"""Models that read text only: one family for each chat format, and one network, whose decoder config.json chooses."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from saccade.models.family import Family

LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    placeholder="",
    placeholder_keys=(),
    text_end_id=2,
    template_switches=("date_string", "tools_in_user_message"),
    plain_positions=True,
    ships_image_settings=False,
)
QWEN2 = replace(
    LLAMA,
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    template_switches=(),
    text_end="<|endoftext|>",
    text_end_id=None,
    tool_format="hermes",
    limits=("The engine refuses text networks with `use_sliding_window`.",),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama_text": LLAMA,
        "mistral_text": replace(
            LLAMA,
            architectures=("MistralForCausalLM", "Ministral3ForCausalLM"),
            model_types=("mistral", "ministral3"),
            template_switches=(),
        ),
        "qwen2_text": QWEN2,
        "qwen3_text": replace(
            QWEN2,
            architectures=("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
            model_types=("qwen3", "qwen3_moe"),
            template_switches=("enable_thinking",),
        ),
        "qwen3_5_text": replace(
            QWEN2,
            architectures=("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            model_types=("qwen3_5_text", "qwen3_5_moe_text"),
            template_switches=("enable_thinking", "preserve_thinking"),
            tool_format="qwen3_coder",
            limits=(),
        ),
        "gemma3_text": replace(
            LLAMA,
            architectures=("Gemma3ForCausalLM",),
            model_types=("gemma3_text",),
            text_end_id=1,
            template_switches=(),
        ),
    }
)
