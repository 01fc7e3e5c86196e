"""An engine over two processes: the answers of one, whatever is asked, when an image fails and when a rank is late."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import psutil
import pytest
import torch

from saccade.engine.loop import Engine
from saccade.nn.layerwise import Layerwise
from saccade.protocol.request import EngineRequest

pytestmark = pytest.mark.ci

SMALL = (1, 4, 6)
WIDE = (1, 6, 16)


@pytest.fixture(scope="module")
def alone(tiny_qwen3_vl: Path) -> Engine:
    return engines.engine(tiny_qwen3_vl, max_num_batched_tokens=24)


@pytest.fixture(scope="module")
def subject(tiny_qwen3_vl: Path) -> Iterator[Engine]:
    with engines.on_ranks(tiny_qwen3_vl, max_num_batched_tokens=24) as subject:
        yield subject


def asked(folder: Path) -> list[EngineRequest]:
    """Text and images, greedy and drawn, with penalties and log probabilities, alone and as three samples."""
    parts_and_params: list[tuple[list[Any], dict[str, Any]]] = [
        ([37], {}),
        ([5, (WIDE, 1), 9, (SMALL, 2), 4], {"num_logprobs": 2, "num_prompt_logprobs": 1}),
        ([(SMALL, 3), 3], {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}),
        ([11, (SMALL, 4)], {"temperature": 0.7, "seed": 4, "top_k": 20}),
    ]
    found = [
        engines.request(folder, parts, str(number), number, **{"max_tokens": 12, **params})
        for number, (parts, params) in enumerate(parts_and_params)
    ]
    found[3] = msgspec.structs.replace(found[3], num_samples=3)
    return found


def other_rank(engine: Engine) -> psutil.Process:
    """The process of rank 1."""
    [process] = [child for child in psutil.Process().children(recursive=True) if "--rank=1" in child.cmdline()]
    return process


def test_two_ranks_answer_as_one(subject: Engine, alone: Engine, tiny_qwen3_vl: Path) -> None:  # [eng] 37
    logits = [engines.record_logits(engine) for engine in (subject, alone)]
    told, expected = (engines.drain(engine, *asked(tiny_qwen3_vl)).answers for engine in (subject, alone))
    assert told.keys() == expected.keys() == {"0", "1", "2", "3", "3#1", "3#2"}
    for name, answer in told.items():
        assert answer.token_ids == expected[name].token_ids
        torch.testing.assert_close(torch.stack(logits[0][name]), torch.stack(logits[1][name]), atol=1e-4, rtol=0)
    assert len(told["1"].logprobs) == 12
    assert len(told["1"].prompt_logprobs) == len(expected["1"].prompt_logprobs) > 0
    assert engines.is_idle(subject)


def test_a_rank_holds_its_part_of_weights_and_caches(subject: Engine, alone: Engine) -> None:
    own, whole = engines.module(subject), engines.module(alone)
    for ours, theirs in zip(own.language_model.layers, whole.language_model.layers, strict=True):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            sizes = [layer.get_submodule(name).weight.numel() for layer in (ours, theirs)]
            assert 2 * sizes[0] == sizes[1], name
    for name in ("language_model.embed_tokens", "lm_head"):
        sizes = [network.get_submodule(name).weight.numel() for network in (own, whole)]
        assert 2 * sizes[0] == sizes[1], name
    keys = [engines.local(engine).runner.caches.layers[0].keys for engine in (subject, alone)]  # type: ignore[union-attr]
    assert 2 * keys[0].numel() == keys[1].numel()


def test_ranks_sum_twice_in_each_layer(subject: Engine, tiny_qwen3_vl: Path) -> None:  # B8
    """And once for the embeddings, of which each rank has a part."""
    with engines.counted_sums() as sums:
        engines.drain(subject, engines.request(tiny_qwen3_vl, [5], max_tokens=1))
    assert len(sums) == 2 * len(engines.module(subject).language_model.layers) + 1


def test_images_are_encoded_once_over_all_ranks(subject: Engine, tiny_qwen3_vl: Path) -> None:
    before = subject.load().encoded_items_total
    images = engines.request(tiny_qwen3_vl, [1, (SMALL, 61), 1, (SMALL, 62), 1, (SMALL, 63)])
    rank_0 = engines.local(subject).runner
    calls: list[int] = []
    encode = rank_0.network.encode

    def counting(pixels: torch.Tensor, metadata: Any) -> Layerwise:
        calls.append(len(pixels))
        return encode(pixels, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_0.network, "encode", counting)
        engines.drain(subject, images)
    assert subject.load().encoded_items_total - before == 3
    assert sum(calls) < 3 * 24 * 768


def test_an_image_that_fails_on_one_rank_fails_its_request_alone(
    subject: Engine, alone: Engine, tiny_qwen3_vl: Path
) -> None:
    """Of two images in one step, rank 0 encodes the first and rank 1 the second."""
    both = [engines.request(tiny_qwen3_vl, [1, (SMALL, seed), 1], str(seed)) for seed in (71, 72)]
    expected = engines.drain(alone, *both).answers

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("secret detail")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines.module(subject), "encode", broken)
        told = engines.drain(subject, *both).answers
    failure = told["71"].failure
    assert failure is not None
    assert failure.code == "internal_error"
    assert "secret" not in failure.message
    assert told["72"].token_ids == expected["72"].token_ids
    assert engines.is_idle(subject)
    # What was computed for the failed request is in no cache.
    assert engines.drain(subject, both[0]).answers["71"].token_ids == expected["71"].token_ids


def test_pixels_stay_until_the_last_rank_has_read(
    subject: Engine, alone: Engine, tiny_qwen3_vl: Path
) -> None:  # [eng] 20
    late = other_rank(subject)
    was_resumed = threading.Event()

    def resume() -> None:
        time.sleep(0.3)
        was_resumed.set()
        late.resume()

    first = engines.request(tiny_qwen3_vl, [1, (SMALL, 81), 1, (SMALL, 82), 1], "first")
    second = engines.request(tiny_qwen3_vl, [1, (SMALL, 83), 1, (SMALL, 84), 1], "second")
    late.suspend()
    timer = threading.Thread(target=resume)
    timer.start()
    subject.requests.submit(0, first)
    subject.step()
    # The step with the first images does not end, and so no other takes their place, before the late rank has read.
    assert was_resumed.is_set()
    timer.join()
    told = engines.drain(subject, second).answers
    expected = engines.drain(alone, second, first).answers
    assert told["second"].token_ids == expected["second"].token_ids
    again = engines.drain(subject, msgspec.structs.replace(first, request_id="again")).answers["again"]
    assert again.token_ids == expected["first"].token_ids
