"""Pixels in the memory that all ranks map."""

import os
from collections.abc import Iterator

import pytest

from saccade.engine.core.step import EncoderInput, StepInput
from saccade.engine.executor.ranks.arena import ARENA_BYTES, PixelArena, create_arena


@pytest.fixture
def ends() -> Iterator[tuple[PixelArena, PixelArena]]:
    """Two mappings of one arena."""
    descriptor = create_arena()
    arenas = PixelArena(descriptor), PixelArena(descriptor)
    os.close(descriptor)
    yield arenas
    for arena in arenas:
        arena.close()


def step(*pixels: bytes) -> StepInput:
    images = [EncoderInput(number, "image", (1, 2, 2), None, content) for number, content in enumerate(pixels)]
    return StepInput(3, ended=(1,), images=tuple(images))


def test_pixels_arrive_and_the_message_has_none(ends: tuple[PixelArena, PixelArena]) -> None:
    writer, reader = ends
    for sent in (step(b"one", b"", b"three"), step(b"two"), step()):
        bare, places = writer.store(sent)
        assert not any(image.pixels for image in bare.images)
        assert reader.restore(bare, places) == sent


def test_pixels_that_do_not_fit_stay_in_the_message(ends: tuple[PixelArena, PixelArena]) -> None:
    writer, reader = ends
    huge = bytes(ARENA_BYTES - 1)
    sent = step(b"ab", huge, b"cd")
    bare, places = writer.store(sent)
    assert [len(image.pixels) for image in bare.images] == [0, len(huge), 0]
    assert reader.restore(bare, places) == sent
