"""An architecture without a family, through HTTP, gateway and our worker: its answer is the reference's. # A1 E1 F7"""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import any_architecture
from processor_answers import check_answers, processed

pytestmark = pytest.mark.conformance

HIDDEN = 'import sys\n\nsys.modules["torchvision"] = None\n'
"""The library imports torchvision if it is installed, and the tests' torch may be another build than it needs."""


def test_answers_equal_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoImageProcessor, AutoProcessor

    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = any_architecture.write(tmp_path / "model", "aya_vision")
    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def process(messages: list[Any], images: list[Any]) -> dict[str, Any]:
        prompt = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return processed(processor, prompt, images)

    check_answers(folder, process)
