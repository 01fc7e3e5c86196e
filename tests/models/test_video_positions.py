"""Positions of videos, and the text behind them, against the networks of transformers. B5, [eng] 4"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import engines
import msgspec
import numpy as np
import torch
from networks import config_of
from tables import table

from saccade import models
from saccade.protocol.media import MediaItem, Span

TEXT, IMAGE, VIDEO = 0, 1, 2


def reference(name: str, folder: Path) -> Any:
    """transformers' model of *folder* without weights: positions need the configuration alone."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(**json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


def divided(one: MediaItem) -> MediaItem:
    """The same video with three tokens of text before each group but the first."""
    groups, length = one.grid[0], one.spans[0].length // one.grid[0]
    starts = range(one.spans[0].start, one.spans[0].start + groups * (length + 3), length + 3)
    return msgspec.structs.replace(one, spans=tuple(Span(start, length) for start in starts))


def item(modality: str, grid: tuple[int, int, int], start: int, seconds: float | None = None) -> MediaItem:
    drawn = engines.image((1, *grid[1:]), 0, start)
    spans = (Span(start, prod(grid) // 4),)
    return msgspec.structs.replace(drawn, modality=modality, grid=grid, spans=spans, seconds_per_group=seconds)


def expected(model: Any, kinds: list[int], media: list[MediaItem], **times: Any) -> tuple[np.ndarray, int]:
    grids = {
        key: torch.tensor(found) if found else None
        for key, modality in (("image_grid_thw", "image"), ("video_grid_thw", "video"))
        for found in [[one.grid for one in media if one.modality == modality]]
    }
    places, delta = model.get_rope_index(torch.zeros(1, len(kinds)).long(), torch.tensor([kinds]), **grids, **times)
    return places[:, 0].numpy(), int(delta)


@table("seed", range(40))
def test_seconds_become_positions(seed: int, network_folder: Callable[[str], Path]) -> None:
    """Qwen2.5-VL's, with two videos and an image, as long as each lasts no longer than its side."""
    folder, draw = network_folder("qwen2_5_vl"), np.random.default_rng(seed)
    spec = models.load_spec("qwen2_5_vl", config_of(folder))
    kinds, media = [TEXT], []
    for kind in (VIDEO, IMAGE, VIDEO):
        groups = int(draw.integers(1, 6)) if kind == VIDEO else 1
        side = 2 * int(draw.integers(5, 9))
        seconds = float(draw.uniform(0.01, 0.5)) if kind == VIDEO else None
        kinds += [TEXT] * int(draw.integers(0, 5))
        media.append(item("video" if kind == VIDEO else "image", (groups, side, 6), len(kinds), seconds))
        kinds += [kind] * (groups * side * 6 // 4) + [TEXT]
    times = torch.tensor([one.seconds_per_group for one in media if one.modality == "video"])
    places, delta = expected(reference("qwen2_5_vl", folder), kinds, media, second_per_grid_ts=times)
    positions = spec.positions(media)
    assert np.array_equal(positions.slice(0, len(kinds)), places)
    assert positions.delta == delta


@table("seconds", [None, 0.1, 1 / 3, 1.0, 1.001, 2.5, 17.3, 1e4])
def test_seconds_of_long_videos(seconds: float | None, network_folder: Callable[[str], Path]) -> None:
    """Within the video as in the reference; the text behind goes on behind the last second, as answers do there."""
    folder = network_folder("qwen2_5_vl")
    spec = models.load_spec("qwen2_5_vl", config_of(folder))
    media = [item("video", (40, 4, 6), 3, seconds)]
    kinds = [TEXT] * 3 + [VIDEO] * 240
    times = {} if seconds is None else {"second_per_grid_ts": torch.tensor([seconds])}
    places, delta = expected(reference("qwen2_5_vl", folder), kinds, media, **times)
    positions = spec.positions(media)
    assert np.array_equal(positions.slice(0, 243), places)
    assert positions.delta == delta


@table("name", ["qwen3_vl", "qwen3_5"])
@table("seed", range(20))
def test_groups_between_times(name: str, seed: int, network_folder: Callable[[str], Path]) -> None:
    """Each group has the positions of an image, however many there are; the text between them goes on behind it."""
    folder, draw = network_folder(name), np.random.default_rng(seed)
    spec = models.load_spec(models.family_of(config_of(folder)), config_of(folder))
    kinds, media = [TEXT], []
    for kind in (VIDEO, IMAGE, VIDEO):
        groups = int(draw.integers(1, 12)) if kind == VIDEO else 1
        grid = (groups, 2 * int(draw.integers(1, 9)), 2 * int(draw.integers(1, 9)))
        kinds += [TEXT] * int(draw.integers(0, 5))
        one = item("video" if kind == VIDEO else "image", grid, len(kinds), 1.0 if kind == VIDEO else None)
        media.append(divided(one))
        for span in media[-1].spans:
            kinds += [TEXT] * (span.start - len(kinds)) + [kind] * span.length
        kinds.append(TEXT)
    places, delta = expected(reference(name, folder), kinds, media)
    positions = spec.positions(media)
    assert np.array_equal(positions.slice(0, len(kinds)), places)
    assert positions.delta == delta


def test_runs_of_placeholders_are_known(network_folder: Callable[[str], Path]) -> None:
    config = {name: config_of(network_folder(name)) for name in ("qwen2_5_vl", "qwen3_vl")}
    specs = {name: models.load_spec(name, one) for name, one in config.items()}
    assert specs["qwen2_5_vl"].span_lengths((3, 4, 6), "video") == (18,)
    assert specs["qwen3_vl"].span_lengths((3, 4, 6), "video") == (6, 6, 6)
    assert specs["qwen3_vl"].span_lengths((1, 4, 6), "image") == (6,)
