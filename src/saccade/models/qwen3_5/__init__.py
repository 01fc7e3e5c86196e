"""Qwen3.5, dense and with experts."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    model_types=("qwen3_5", "qwen3_5_moe"),
    placeholder="<|image_pad|>",
    video_placeholder="<|video_pad|>",
    # preserve_thinking is a switch of 3.6, whose checkpoints have the same architectures.
    template_switches=("add_vision_id", "enable_thinking", "preserve_thinking"),
    tool_format="qwen3_coder",
    external_grid="image_grid_thw",
    limits=("The layer that drafts one more token (`mtp.*`) is not loaded: the engine does no speculative decoding.",),
)
