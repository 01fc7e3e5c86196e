"""Qwen's vision-language models, from Qwen2-VL to Qwen3.6: their families, and how they differ."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from saccade.models.family import Family, Release
from saccade.models.qwen_vl.page_forms import CHANDRA, CHANDRA_2, OLMOCR

ALL_BUT_DOCUMENTS: Final = ("chat", "boxes", "video")
QWEN2 = Family(
    architectures=("Qwen2VLForConditionalGeneration",),
    model_types=("qwen2_vl",),
    placeholder="<|image_pad|>",
    video_placeholder="<|video_pad|>",
    text_end="<|endoftext|>",
    text_end_id=151_645,
    template_switches=("add_vision_id",),
    tool_format="hermes",
    external_grid="image_grid_thw",
    # QwenLM/Qwen3-VL: qwen-vl-finetune/tools/process_bbox.ipynb of Qwen2-VL and Qwen2.5-VL, and
    # cookbooks/omni_recognition.ipynb of Qwen3-VL; QwenLM/Qwen3.8-Flash-Next, issue 4, of the models after it.
    box_coordinates="thousandths",
    limits=("The engine refuses text networks with `use_sliding_window`.",),
    parts={"Layout": "Layout14", "VideoLayout": "VideoLayout14", "Spec": "Spec2", "Network": "Network2"},
)
QWEN3 = replace(
    QWEN2,
    architectures=("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    model_types=("qwen3_vl", "qwen3_vl_moe"),
    text_end_id=None,
    limits=(),
    page_forms={"chandra": CHANDRA},
    releases=(
        Release("Qwen/Qwen3-VL-2B-Instruct", 2.13, ALL_BUT_DOCUMENTS),
        Release("Qwen/Qwen3-VL-4B-Instruct", 4.44, ALL_BUT_DOCUMENTS),
        Release("Qwen/Qwen3-VL-8B-Instruct", 8.77, ALL_BUT_DOCUMENTS),
        Release("Qwen/Qwen3-VL-32B-Instruct", 33.4, ALL_BUT_DOCUMENTS),
        Release("datalab-to/chandra", 8.77, ("documents",)),
    ),
    parts={"Layout": "Layout16", "VideoLayout": "VideoLayout16", "Spec": "Spec3", "Network": "Network3"},
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl": QWEN2,
        "qwen2_5_vl": replace(
            QWEN2,
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            model_types=("qwen2_5_vl",),
            page_forms={"olmocr": OLMOCR},
            box_coordinates="pixels",
            releases=(Release("allenai/olmOCR-2-7B-1025", 8.29, ("documents",)),),
            parts={**QWEN2.parts, "Spec": "WindowedSpec", "Network": "WindowedNetwork"},
        ),
        "qwen3_vl": QWEN3,
        "qwen3_5": replace(
            QWEN3,
            architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
            model_types=("qwen3_5", "qwen3_5_moe"),
            # preserve_thinking is a switch of 3.6, whose checkpoints have the same architectures.
            template_switches=("add_vision_id", "enable_thinking", "preserve_thinking"),
            tool_format="qwen3_coder",
            page_forms={"chandra-ocr-2": CHANDRA_2},
            releases=(),
            parts={**QWEN3.parts, "Spec": "HybridSpec", "Network": "HybridNetwork"},
        ),
    }
)
