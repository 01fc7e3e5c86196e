"""Families that Saccade has itself answer the same by the classes of transformers. E1, F7"""

from pathlib import Path

import engines
import numpy as np
import pytest
import torch
from checkpoints import NETWORKS

from saccade import models
from saccade.gateway.prompt.placeholders import expand, write_images
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files, with_overrides
from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest, SamplingParams

SIDES = {"gemma3": 64, "internvl": 56}
"""Of images that need no resize, which a family does by another library's arithmetic."""

NUM_IMAGES = 2


def asked(served: ServedModel, side: int) -> EngineRequest:
    """The request that a gateway makes of a question about images of noise."""
    parts = [*({"type": "image"} for _ in range(NUM_IMAGES)), {"type": "text", "text": "What is in these images?"}]
    segments = served.template.render([{"role": "user", "content": parts}], add_generation_prompt=True)
    settings = served.layout.settings
    layouts = [served.layout.image(side, side, settings) for _ in range(NUM_IMAGES)]
    written = write_images(segments, served.tokenizer.special_tokens, served.placeholders, layouts)
    token_ids, spans = expand(served.tokenizer.encode(written), served.placeholders, layouts)
    media = []
    for number, (layout, own) in enumerate(zip(layouts, spans, strict=True)):
        pixels = np.zeros(layout.pixel_shape, np.uint8)
        rgb = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        models.load_pixels(served.family)(settings).write_pixels(rgb, layout, pixels)
        item = MediaItem(
            modality="image", content_hash=bytes([number]) * 32, grid=layout.grid, spans=own,
            pixel_shape=layout.pixel_shape, original_size=layout.original_size, inline=pixels.tobytes(),
        )  # fmt: skip
        media.append(item)
    sampling = SamplingParams(max_tokens=32, temperature=0)
    return EngineRequest(request_id="a", token_ids=token_ids, sampling=sampling, media=tuple(media))


def answered(
    folder: Path, side: int, implementation: str, chunk: int
) -> tuple[list[int], engines.Answer, torch.Tensor]:
    """The ids of the prompt, and the answer with its logits."""
    files = with_overrides(read_model_files(folder), None, None, implementation=implementation)
    request = asked(ServedModel.from_files(folder.name, files, 4096), side)
    subject = engines.engine(folder, model_impl=implementation, max_num_batched_tokens=chunk, max_num_seqs=4)
    logits = engines.record_logits(subject)
    answer = engines.drain(subject, request).answers["a"]
    return request.token_ids, answer, torch.stack(logits["a"])


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("name", SIDES)
def test_answers_are_those_of_the_family(tmp_path: Path, name: str, chunk: int) -> None:
    folder = NETWORKS[name](tmp_path)
    ids, own, logits = answered(folder, SIDES[name], "saccade", chunk)
    other_ids, other, other_logits = answered(folder, SIDES[name], "transformers", chunk)
    assert other_ids == ids
    assert other.token_ids == own.token_ids
    torch.testing.assert_close(other_logits, logits, atol=1e-4, rtol=1e-4)
