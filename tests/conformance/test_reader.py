"""The bundled model answers 500 fresh images a kind as the reference does; rounded, nearly as before. # A10, F8"""

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chats import openai_messages, reference_messages
from reference import Completion, Reference
from server import Server, serving

from saccade import LLM, SamplingParams
from saccade.cli.bundled import bundled
from saccade.llm.results import ChatResult

ROOT = Path(__file__).parents[2]
IMAGES = 500
SEED = 7_000_000
TIE = 1e-4
KINDS = ("text", "colour", "shape", "shape_colour")


@pytest.fixture(scope="module")
def draw() -> Any:
    """The drawing function of the training script; the seed range is nobody else's."""
    # A name of its own: the tests have a module `images` too.
    name = "train_demo_images"
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts/train_demo/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.draw


@pytest.fixture(scope="module")
def reader() -> Iterator[Server]:
    """`saccade serve` on the bundled model."""
    with serving() as server:
        yield server


def margin(reference: Reference, text: str, expected: Completion) -> float:
    """How far apart the reference's two best logits lie at the first token in which *text* differs."""
    ids = reference.tokenizer(text, add_special_tokens=False)["input_ids"]
    pairs = zip(ids, expected.token_ids, strict=False)
    step = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), len(ids))
    top = expected.logits[step].topk(2).values
    return float(top[0] - top[1])


@pytest.mark.conformance
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_images(reader: Server, draw: Any, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    client, model = reader.client(), reader.model
    reference = Reference(bundled("model"))
    items = [draw(kind, SEED + number) for number in range(IMAGES)]

    def ask(item: Any) -> str:
        messages = openai_messages(item.image, item.question)
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as threads:
        ours = list(threads.map(ask, items))
    different, ties, right = [], [], 0
    for number, (item, text) in enumerate(zip(items, ours, strict=True)):
        expected = reference.complete(*reference_messages(item.image, item.question))
        right += text == item.answer
        if text != expected.text:
            gap = margin(reference, text, expected)
            (ties if gap < TIE else different).append((number, text, expected.text, gap))
    with capsys.disabled():
        print(f"\n{kind}: {right}/{IMAGES} right, {len(different)} differ from the reference, ties set aside: {ties}")
    assert different == []
    assert len(ties) < IMAGES // 100
    assert right >= 0.95 * IMAGES


def answers(items: list[Any], **settings: Any) -> list[ChatResult]:
    """The model's answers, computed in batches and without a server."""
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": item.image}, {"type": "text", "text": item.question}]}]
        for item in items
    ]
    sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=True)
    with LLM(**settings) as llm:
        batches = (chats[start : start + IMAGES] for start in range(0, len(chats), IMAGES))
        results = [one for batch in batches for one in llm.chat(batch, sampling)]
    assert [one.error for one in results if one.error is not None] == []
    return results


@pytest.mark.conformance
@pytest.mark.timeout(3600)
def test_rounded_weights_change_few_answers(draw: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 2,000: at most 1 % in int8, and 5 % in int4."""
    items = [draw(kind, SEED + number) for kind in KINDS for number in range(IMAGES)]
    plain = answers(items)
    for choice, most in (("int8", 0.01), ("int4", 0.05)):
        rounded = answers(items, quantization=choice)
        assert rounded[0].choices[0].logprobs != plain[0].choices[0].logprobs
        different = sum(ours.text != theirs.text for ours, theirs in zip(rounded, plain, strict=True))
        right = sum(one.text == item.answer for one, item in zip(rounded, items, strict=True))
        with capsys.disabled():
            print(f"\n{choice}: {different} of {len(items)} answers differ, and {right} are right")
        assert different <= most * len(items)
