"""GLM's vision-language models: GLM-4.1V, 4.5V and 4.6V, and the document reader GLM-OCR."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from saccade.models.family import Family, PageForm, Release

DRAFT = "The layer that drafts one more token is not loaded."
GLM4V = Family(
    architectures=(
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Glm46VForConditionalGeneration",
    ),
    model_types=("glm4v", "glm4v_moe", "glm46v"),
    placeholder="<|image|>",
    # The placeholder of images also stands for the frames of videos.
    video_placeholder="<|image|>",
    template_switches=("enable_thinking",),
    tool_format="glm45",
    # zai-org/GLM-V, README.md.
    box_coordinates="thousandths",
    limits=(DRAFT,),
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "glm4v": GLM4V,
        "glm_ocr": replace(
            GLM4V,
            architectures=("GlmOcrForConditionalGeneration",),
            model_types=("glm_ocr",),
            page_forms={"glm-ocr": PageForm("Text Recognition:")},
            box_coordinates=None,
            releases=(Release("zai-org/GLM-OCR", 1.1, ("documents",)),),
            parts={"Spec": "OcrSpec", "Network": "OcrNetwork"},
        ),
    }
)
