"""Mistral Small 3.1 through HTTP, gateway and our worker: its answers are the reference's. # A1 A4 A10"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processor_answers import check_answers, processed
from references.native import Rows

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", ["mistral3", "ministral3"])
def test_answers_equal_the_reference(name: str, network_folder: Callable[[str], Path]) -> None:
    folder = network_folder(name)
    rows = Rows(folder)
    processor = partial(rows.processor, add_special_tokens=False)

    def process(messages: list[Any], images: list[Any]) -> dict[str, Any]:
        return processed(processor, rows.render(messages, add_generation_prompt=True, switches={}), images)

    check_answers(folder, process)
