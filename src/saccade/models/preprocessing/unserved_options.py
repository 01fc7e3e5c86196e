"""Refuses, by name, request options that a family does not support. Does not import torch."""

from saccade.errors import InvalidValue
from saccade.models.family import ImageOptions, VideoOptions

LIMITS = ("min_pixels", "max_pixels")
SIDES = ("resized_height", "resized_width")
FRAMES = ("min_frames", "max_frames")
OF_VIDEOS = (*SIDES, *FRAMES, "total_pixels")


def refuse(options: ImageOptions | VideoOptions, *names: str) -> None:
    """Raise InvalidValue if *options* set one of *names*."""
    for name in names:
        if getattr(options, name) is not None:
            raise InvalidValue(f"`{name}` is not served for this model; leave it out.", f"mm_processor_kwargs.{name}")
