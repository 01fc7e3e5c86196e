"""Which form a model's name stands for."""

import pytest
from tables import table

from saccade.documents.forms import GENERAL, find_form, page_forms
from saccade.errors import StartupError


@table(
    ("model", "form"),
    [
        ("PaddlePaddle/PaddleOCR-VL-1.6", "paddleocr-vl"),
        ("PaddleOCR-VL-1.6-0.9B", "paddleocr-vl"),
        ("zai-org/GLM-OCR", "glm-ocr"),
        ("GLM_OCR-fp8", "glm-ocr"),
        ("datalab-to/chandra", "chandra"),
        ("datalab-to/chandra-ocr-2", "chandra-ocr-2"),
        ("allenai/olmOCR-2-7B-1025-FP8", "olmocr"),
        ("saccade-reader", "saccade-reader"),
        ("Qwen/Qwen3-VL-2B-Instruct", GENERAL),
        ("my-model", GENERAL),
        ("chandra-tunes/Qwen3-VL-2B", GENERAL),
    ],
)
def test_form_is_in_the_name_of_the_model(model: str, form: str) -> None:
    assert find_form(model) == page_forms()[form]


def test_form_may_be_named() -> None:
    assert find_form("my-model", "chandra") == page_forms()["chandra"]
    with pytest.raises(StartupError, match=r"There is no form chandar\. The forms are chandra, chandra-ocr-2, glm-ocr"):
        find_form("my-model", "chandar")


def test_prompt_names_the_scale_of_its_boxes() -> None:
    assert "normalized 0-1024." in find_form("chandra").prompt
    assert "normalized 0-1000." in find_form("chandra-ocr-2").prompt
