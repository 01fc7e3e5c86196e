"""Each vision backend in bfloat16 beside the network in float32, which the conformance suite holds to the reference."""

from pathlib import Path

import engines
import pytest
import torch

from saccade.nn.backends import AUTO, PLAIN

PROMPTS: list[list[int | tuple[engines.Grid, int]]] = [
    [70],
    [5, ((1, 8, 12), 1), 9],
    [3, ((1, 20, 22), 2), ((1, 6, 6), 3)],
]


def first_logits(folder: Path, **settings: object) -> dict[str, torch.Tensor]:
    """What each prompt's first token is chosen from."""
    subject = engines.engine(folder, **settings)
    rows = engines.record_logits(subject)
    asked = [engines.request(folder, parts, str(number), number, max_tokens=2) for number, parts in enumerate(PROMPTS)]
    engines.drain(subject, *asked)
    return {request_id: logits[0] for request_id, logits in rows.items()}


@pytest.fixture(scope="module")
def exact(tiny_qwen3_vl: Path) -> dict[str, torch.Tensor]:
    return first_logits(tiny_qwen3_vl)


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", [PLAIN, AUTO])
def test_logits_are_as_near_as_bfloat16_allows(
    tiny_qwen3_vl: Path, exact: dict[str, torch.Tensor], backend: str, threads: int, chunk: int
) -> None:
    before = torch.get_num_threads()
    settings = {"threads": threads, "max_num_batched_tokens": chunk}
    rows = first_logits(tiny_qwen3_vl, dtype="bfloat16", mm_encoder_attn_backend=backend, **settings)
    torch.set_num_threads(before)
    assert rows.keys() == exact.keys()
    for request_id, logits in rows.items():
        spread = exact[request_id].std()
        differences = (logits - exact[request_id]).abs() / spread
        assert differences.mean() < 0.02
        assert differences.max() < 0.1
