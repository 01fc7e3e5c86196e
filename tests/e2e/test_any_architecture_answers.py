"""An architecture without a family, through HTTP, gateway and our worker: its answer is the reference's. # A1 E1 F7"""

from pathlib import Path
from typing import Any

import pytest
from chats import random_image
from checkpoints import any_architecture
from processor_answers import check_answers, processed

from saccade import LLM, SamplingParams
from saccade.errors import TooManyImages

pytestmark = pytest.mark.conformance

HIDDEN = 'import sys\n\nsys.modules["torchvision"] = None\n'
"""The library imports torchvision if it is installed, and the tests' torch may be another build than it needs."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint; processes that a test starts do not find torchvision."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return any_architecture.write(tmp_path / "model", "aya_vision")


def test_answers_equal_the_reference(folder: Path) -> None:
    from transformers import AutoImageProcessor, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def process(messages: list[Any], images: list[Any]) -> dict[str, Any]:
        prompt = processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return processed(processor, prompt, images)

    check_answers(folder, process)


def test_python_programs_need_no_further_setting(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        content = [{"type": "image", "image": random_image(64, 48, 1)}, {"type": "text", "text": "What is it?"}]
        [answer] = llm.chat([[{"role": "user", "content": content}]], SamplingParams(max_tokens=3, min_tokens=3))
    assert answer.usage.completion_tokens == 3


def test_model_whose_images_stand_alone_takes_one_a_request(folder: Path, tmp_path: Path) -> None:
    alone = any_architecture.write(tmp_path / "alone", "llava_onevision")
    one = {"type": "image", "image": random_image(64, 48, 1)}
    with LLM(str(alone)) as llm:
        answers = [
            llm.chat([[{"role": "user", "content": [one] * count}]], SamplingParams(max_tokens=3, min_tokens=3))[0]
            for count in (1, 2)
        ]
    assert answers[0].error is None
    assert isinstance(answers[1].error, TooManyImages)
    assert "one image a request" in answers[1].error.message
