"""Qwen2.5-VL."""

from saccade.models.family import Family

FAMILY = Family(
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    model_types=("qwen2_5_vl",),
    placeholder="<|image_pad|>",
    video_placeholder="<|video_pad|>",
    template_switches=("add_vision_id",),
    tool_format="hermes",
    external_grid="image_grid_thw",
    limits=("The engine refuses text networks with `use_sliding_window`.",),
)
