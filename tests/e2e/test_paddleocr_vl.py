"""PaddleOCR-VL through HTTP: what paddlex 3.7.2's client sends to a `vllm-server`, and transformers' answers. # A1 A10

The request is that of `paddlex.inference.models.doc_vlm.predictor`: each region as a JPEG, its question, and the
pipeline's limits of pixels.
"""

import base64
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import data_url, random_image
from PIL import Image
from processor_answers import check_json
from references.native import load
from references.networks import image_text_model
from server import serving

pytestmark = pytest.mark.conformance

MAX_TOKENS = 24
NAME = "PaddleOCR-VL-1.6-0.9B"
REGIONS = (
    ("OCR:", (300, 60), {"min_pixels": 12544, "max_pixels": 100352}),
    ("Table Recognition:", (150, 200), {"min_pixels": 12544, "max_pixels": 100352}),
    ("Formula Recognition:", (200, 12), {"min_pixels": 3136, "max_pixels": 20000}),
    ("Chart Recognition:", (120, 90), {"min_pixels": 50000, "max_pixels": 100352}),
    ("OCR:", (300, 60), {"min_pixels": 3136, "max_pixels": 6272}),
)
"""Question, size and limits of pixels; the last one is the first image in another size."""


@torch.inference_mode()
def expected(processor: Any, model: Any, url: str, question: str, limits: dict[str, int]) -> tuple[list[int], int]:
    """The reference's ids of prompt and answer, and the length of the prompt."""
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    size = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        inputs = processor(text=prompt, images=[image], images_kwargs={"size": size}, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, repetition_penalty=1.05)
    return output[0].tolist(), inputs["input_ids"].shape[1]


def test_answers_to_the_pipeline_equal_the_reference(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("paddleocr_vl")
    processor, model = load(folder, "AutoProcessor"), image_text_model(folder)
    with serving(str(folder), "--served-model-name", NAME, "--max-model-len", "2048") as server:
        client = server.client()
        for seed, (question, size, limits) in enumerate(REGIONS):
            url = data_url(random_image(*size, seed % 4), "JPEG")
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
            answer: Any = client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
                temperature=0,
                max_completion_tokens=MAX_TOKENS,
                timeout=600,
                extra_body={
                    "skip_special_tokens": True,
                    "repetition_penalty": 1.05,
                    "mm_processor_kwargs": limits,
                    "return_token_ids": True,
                },
            )
            output, length = expected(processor, model, url, question, limits)
            assert answer.prompt_token_ids == output[:length], question
            assert answer.usage.prompt_tokens == length
            assert answer.choices[0].token_ids == output[length:], question
            assert "<|" not in answer.choices[0].message.content
        check_json(server)
