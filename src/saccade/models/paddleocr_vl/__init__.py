"""PaddleOCR-VL, which reads regions of documents."""

from saccade.models.family import Family, PageForm, Release

FAMILY = Family(
    architectures=("PaddleOCRVLForConditionalGeneration",),
    model_types=("paddleocr_vl",),
    placeholder="<|IMAGE_PLACEHOLDER|>",
    text_end_id=2,
    page_forms={"paddleocr-vl": PageForm("OCR:")},
    releases=(Release("PaddlePaddle/PaddleOCR-VL-1.6", 0.96, ("documents",)),),
)
