"""LLaVA-NeXT through HTTP, gateway and our worker: its answers are the reference's for the same images. # A1 A10"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processor_answers import check_answers, processed
from references.native import Crops

pytestmark = pytest.mark.conformance


def test_answers_equal_the_reference(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("llava_next")
    crops = Crops(folder)

    def process(messages: list[Any], images: list[Any]) -> dict[str, Any]:
        return processed(crops.processor, crops.render(messages, add_generation_prompt=True, switches={}), images)

    check_answers(folder, process)
