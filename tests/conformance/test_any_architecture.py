"""Architectures without a family, computed by transformers' classes: ids, logits and greedy answers against its own. E1, F7"""

from functools import cache
from pathlib import Path
from typing import Any

import engines
import msgspec
import numpy as np
import pytest
import torch
from checkpoints import any_architecture
from PIL import Image
from references.networks import image_text_model
from torch.nn import functional

from saccade import models
from saccade.errors import StartupError
from saccade.gateway.prompt.placeholders import expand, write_images
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files
from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest, SamplingParams

ATOL = 1e-4
NAMES = any_architecture.SERVED
SIZES = tuple((round(20 * 1.6 ** (number % 8)), round(24 * 1.5 ** (number % 7))) for number in range(40))
QUESTION = "What is in this image? Describe the picture, please."
ONE, TWO = ((150, 100),), ((90, 210), (150, 100))


EVERYDAY = "aya_vision"
"""The architecture of the everyday suite: tiles, text between placeholders, another mark in templates, and windows."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == EVERYDAY else pytest.mark.conformance) for name in NAMES],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the architecture *name*."""
    return any_architecture.write(tmp_path_factory.mktemp("any") / name, name)


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return ServedModel.from_files(folder.name, read_model_files(folder), 4096)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    """The reference's processor, with the arithmetic that needs no torch."""
    from transformers import AutoImageProcessor, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor


def noise(size: tuple[int, int]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size[0] * 10_000 + size[1]).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def prompt(served: ServedModel, sizes: tuple[tuple[int, int], ...], question: str = QUESTION) -> list[Any]:
    parts = [*({"type": "image"} for _ in sizes), {"type": "text", "text": question}]
    return served.template.render([{"role": "user", "content": parts}], add_generation_prompt=True)


def asked(
    served: ServedModel, sizes: tuple[tuple[int, int], ...], request_id: str = "a", question: str = QUESTION
) -> EngineRequest:
    """The request that a gateway makes of a question about images of noise."""
    settings = served.layout.settings
    layouts = [served.layout.image(*size, settings) for size in sizes]
    written = write_images(
        prompt(served, sizes, question), served.tokenizer.special_tokens, served.placeholders, layouts
    )
    token_ids, spans = expand(served.tokenizer.encode(written), served.placeholders, layouts)
    media = []
    for size, layout, own in zip(sizes, layouts, spans, strict=True):
        pixels = np.zeros(layout.pixel_shape, np.uint8)
        models.load_pixels(served.family)(settings).write_pixels(noise(size), layout, pixels)
        item = MediaItem(
            modality="image", content_hash=bytes([*size[0].to_bytes(16), *size[1].to_bytes(16)]), grid=layout.grid,
            spans=own, pixel_shape=layout.pixel_shape, inline=pixels.tobytes(),
        )  # fmt: skip
        media.append(item)
    sampling = SamplingParams(max_tokens=32, temperature=0)
    return EngineRequest(request_id=request_id, token_ids=token_ids, sampling=sampling, media=tuple(media))


def reference_inputs(
    processor: Any, served: ServedModel, sizes: tuple[tuple[int, int], ...], question: str = QUESTION
) -> Any:
    """What transformers makes of the same question: ids, and tensors of the images."""
    text = "".join(segment.text for segment in prompt(served, sizes, question))
    images = [Image.fromarray(noise(size)) for size in sizes]
    return processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)


def test_ids_of_forty_sizes_are_the_processors(served: ServedModel, processor: Any) -> None:
    for size in SIZES:
        ours = asked(served, (size,))
        assert ours.token_ids == reference_inputs(processor, served, (size,))["input_ids"][0].tolist(), size


@cache
def oracle(folder: Path) -> Any:
    return image_text_model(folder)


@torch.inference_mode()
def reference_logits(model: Any, inputs: Any, answer: list[int]) -> torch.Tensor:
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.int64)], dim=1)
    tensors = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    for key in [key for key in tensors if "type_id" in key]:
        tensors[key] = functional.pad(tensors[key], (0, len(answer) - 1))
    return model(input_ids=ids, **tensors).logits[0, inputs["input_ids"].shape[1] - 1 :].float()


def check(model: Any, inputs: Any, placeholder: int, answer: engines.Answer, rows: list[torch.Tensor]) -> None:
    both = torch.stack(rows), reference_logits(model, inputs, answer.token_ids)
    assert len(answer.token_ids) == len(rows)
    ours, reference = (logits.index_fill(1, torch.tensor([placeholder]), 0) for logits in both)
    torch.testing.assert_close(ours, reference, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize("chunk", [7, 64, 2048])
@pytest.mark.parametrize("sizes", [(), ONE, TWO], ids=["text", "one", "two"])
def test_answers_are_the_references(
    name: str, folder: Path, served: ServedModel, processor: Any, sizes: tuple[tuple[int, int], ...], chunk: int
) -> None:
    if name in any_architecture.ALONE and len(sizes) > 1:
        pytest.skip("one image a request")
    subject = engines.engine(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    inputs = reference_inputs(processor, served, sizes)
    placeholder = served.placeholder_token_id
    assert placeholder is not None
    for request_id in ("fresh", "cached"):
        one = asked(served, sizes, request_id)
        assert one.token_ids == inputs["input_ids"][0].tolist()
        answer = engines.drain(subject, one).answers[request_id]
        check(oracle(folder), inputs, placeholder, answer, logits[request_id])
    assert answer.num_cached_tokens == 16 * ((len(one.token_ids) - 1) // 16)


def test_batch_is_answered_as_each_alone(folder: Path, served: ServedModel, processor: Any) -> None:
    subject = engines.engine(folder, max_num_batched_tokens=64)
    logits = engines.record_logits(subject)
    questions = {str(number): (ONE if number % 2 else (), QUESTION[number:]) for number in range(6)}
    requests = [asked(served, sizes, key, question) for key, (sizes, question) in questions.items()]
    answers = engines.drain(subject, *requests).answers
    placeholder = served.placeholder_token_id
    assert placeholder is not None
    for key, (sizes, question) in questions.items():
        check(
            oracle(folder), reference_inputs(processor, served, sizes, question), placeholder, answers[key], logits[key]
        )


@pytest.mark.conformance
def test_samples_whose_state_is_taken_away_are_the_references(
    name: str, folder: Path, served: ServedModel, processor: Any
) -> None:
    subject = engines.engine(folder, max_num_batched_tokens=64, encoder_cache_bytes=0, enable_prefix_caching=False)
    logits = engines.record_logits(subject)
    sizes = ONE if name in any_architecture.ALONE else TWO
    request = msgspec.structs.replace(asked(served, sizes), num_samples=2)
    preempted: list[str] = []

    def preempt() -> None:
        if subject.load().steps_total % 11 == 0:
            for sequence in [one for one in subject.scheduler.running if preempted.count(one.request_id) < 4]:
                subject.scheduler.preempt(sequence)
                preempted.append(sequence.request_id)

    answers = engines.drain(subject, request, each_step=preempt).answers
    placeholder = served.placeholder_token_id
    assert placeholder is not None
    assert len(preempted) >= 2
    inputs = reference_inputs(processor, served, sizes)
    for sample in ("a", "a#1"):
        check(oracle(folder), inputs, placeholder, answers[sample], logits[sample])


def test_class_that_does_more_with_an_image_is_refused(tmp_path: Path) -> None:
    folder = any_architecture.write(tmp_path, "ovis2")
    with pytest.raises(StartupError, match="Ovis2ForConditionalGeneration does more with an image"):
        engines.engine(folder)
