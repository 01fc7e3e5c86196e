"""GLM-4.xV and GLM-OCR through HTTP, gateway and our worker: the answers are the reference's. # A1 A4 A10"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from processor_answers import check_answers
from references.native import load

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", ["glm4v", "glm4v_moe", "glm_ocr"])
def test_answers_equal_the_reference(name: str, network_folder: Callable[[str], Path]) -> None:
    folder = network_folder(name)
    processor = load(folder, "AutoProcessor")

    def process(messages: list[Any], images: list[Any]) -> Mapping[str, Any]:
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
        inputs: Mapping[str, Any] = processor(text=prompt, images=images or None, return_tensors="pt")
        return inputs

    check_answers(folder, process, "enable_thinking")
