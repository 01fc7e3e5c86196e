"""Trained weights, dequantised from 4 bits: SmolLM2's text, and the same in a SmolVLM with a random tower. A10"""

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
import transformers
from references.networks import TilesOracle

from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.real
LICENSE = Path(__file__).parents[2] / "LICENSE"
NUM_SCORED = 512
PERPLEXITY = 15.945
"""Of the first tokens of the Apache licence by transformers in float32; random weights are above 40,000."""

TOPICS = ("rain", "bread", "the Moon", "a violin", "photosynthesis", "chess", "the number 7", "iron", "sleep", "Rome")
ASKED = (
    "What is {}?", "Write one sentence about {}.", "Name three things about {}.", "Who likes {}?", "Translate {} into French.",
    "Is {} old?", "Explain {} to a child.", "Write a haiku about {}.", "What rhymes with {}?", "Where do I find {}?",
)  # fmt: skip
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def released() -> Any:
    from real.smollm2 import SmolLM2  # imports gguf, which scripts/real installs

    return SmolLM2()


@pytest.fixture(scope="module")
def folder(released: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(released.write(tmp_path_factory.mktemp("smollm2")))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def engine(folder: Path, **settings: Any) -> Engine:
    return engines.engine(folder, num_blocks=512, max_num_batched_tokens=512, max_num_seqs=8, **settings)


def asked(request_id: str, token_ids: list[int], **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 0, **sampling})
    return EngineRequest(request_id=request_id, token_ids=token_ids, sampling=params)


def test_weights_are_those_that_transformers_reads(released: Any, reference: Any) -> None:
    """Queries and keys above all: llama.cpp keeps their channels in another order."""
    file = sys.modules["real.smollm2"].FILE
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = reference.state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    assert [name for name, value in theirs.state_dict().items() if not torch.equal(value, ours[name])] == []


def perplexity(folder: Path, token_ids: list[int], dtype: str, **settings: Any) -> float:
    subject = engine(folder, dtype=dtype, **settings)
    scored = engines.drain(subject, asked("scored", token_ids, max_tokens=1, num_prompt_logprobs=0))
    logprobs = [one.logprob for one in scored.answers["scored"].prompt_logprobs]
    assert len(logprobs) == len(token_ids) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


def test_perplexity_of_the_licence(folder: Path, tokenizer: Any) -> None:
    token_ids = tokenizer(LICENSE.read_text())["input_ids"][:NUM_SCORED]
    exact = perplexity(folder, token_ids, "float32")
    assert exact == pytest.approx(PERPLEXITY, rel=1e-4)
    assert perplexity(folder, token_ids, "bfloat16") == pytest.approx(exact, rel=5e-3)


@pytest.mark.parametrize(("choice", "most"), [("int8", 1.06), ("int4", 1.6)])
def test_perplexity_of_rounded_weights(
    folder: Path, tokenizer: Any, choice: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small model loses much in int4; others would lose more, since these weights had 4 bits before."""
    token_ids = tokenizer(LICENSE.read_text())["input_ids"][:NUM_SCORED]
    found = perplexity(folder, token_ids, "bfloat16", quantization=choice)
    with capsys.disabled():
        print(f"\n{choice}: perplexity {found:.2f}, beside {PERPLEXITY:.2f} of plain weights in float32")
    assert found <= most * PERPLEXITY


@torch.inference_mode()
def test_a_hundred_chats_have_the_answers_of_transformers(folder: Path, reference: Any, tokenizer: Any) -> None:
    chats = [text.format(topic) for text, topic in product(ASKED, TOPICS)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, return_dict=False
        )
        for chat in chats
    ]
    subject = engine(folder)
    requests = [
        asked(chat, prompt, stop_token_ids=(tokenizer.eos_token_id,))
        for chat, prompt in zip(chats, prompts, strict=True)
    ]
    answers = engines.drain(subject, *requests).answers
    for chat, prompt in zip(chats, prompts, strict=True):
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
        assert answers[chat].token_ids == whole[len(prompt) :], chat


def test_images_beside_trained_text(released: Any, tmp_path: Path) -> None:
    folder = released.write_vision(tmp_path)
    subject = engine(folder)
    logits = engines.record_logits(subject)
    request = engines.request(folder, [5, ((150, 100), 1), 9], "image", max_tokens=12)
    answer = engines.drain(subject, request).answers["image"]
    expected = TilesOracle(folder).logits(request, answer.token_ids)
    torch.testing.assert_close(torch.stack(logits["image"])[:, : expected.shape[1]], expected, atol=1e-3, rtol=0)
    assert answer.token_ids == expected.argmax(-1).tolist()
