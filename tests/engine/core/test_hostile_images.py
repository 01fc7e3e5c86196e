"""Images that no gateway would send: every family refuses them from numbers alone, before anything is allocated."""

import itertools
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from tables import table

from saccade import models
from saccade.engine.core.request_validation import RequestValidator
from saccade.errors import InvalidValue
from saccade.models.files import engine_config, parse_json, read_model_files
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.ci

LARGE = 1 << 40
SIDES = [(0, 4), (-4, -4), (4, -8), (3, 5), (LARGE, 4), (24, LARGE), (LARGE, LARGE), (1 << 62, 1 << 62)]
SIZES: list[tuple[int, int] | None] = [None, (0, 0), (-1, 5), (1, 1 << 63), (1 << 63, 1), (1 << 63, 1 << 63)]
MIB = 1 << 20


def spec_of(folder: Path) -> Any:
    files = read_model_files(folder)
    family = models.family_of(parse_json(files, "config.json"))
    return models.load_spec(family, engine_config(files, models.families()[family]))


def request(spec: Any, grid: tuple[int, int, int], size: tuple[int, int] | None, num_tokens: int) -> EngineRequest:
    """A request whose only image claims to be what its grid says."""
    try:
        shape = spec.pixel_shape(grid)
    except InvalidValue:
        shape = (1, 1)
    item = MediaItem(
        modality="image",
        content_hash=bytes(32),
        grid=grid,
        spans=(Span(1, num_tokens),),
        pixel_shape=shape,
        original_size=size,
    )
    token_ids = [1, *[spec.placeholder_of["image"]] * num_tokens, 1]
    return EngineRequest(request_id="a", token_ids=token_ids, sampling=SamplingParams(max_tokens=1), media=(item,))


@table("name", list(checkpoints.NETWORKS))
def test_hostile_images_are_refused_before_allocation(name: str, network_folder: Callable[[str], Path]) -> None:
    spec = spec_of(network_folder(name))
    validator = RequestValidator(spec, bytes(32), spec.max_position_embeddings)
    # Of a base view alone, which a size may claim to be all that is left, and of one merged square.
    counts = {1, 4, spec.item_tokens(spec.square_grid(0)) or 1, 16}
    tracemalloc.start()
    try:
        for frames, sides, size, num_tokens in itertools.product((1, 2), SIDES, SIZES, sorted(counts)):
            with pytest.raises(InvalidValue, match=r"grid|image|size"):
                validator.validated(0, request(spec, (frames, *sides), size, num_tokens), 1)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
