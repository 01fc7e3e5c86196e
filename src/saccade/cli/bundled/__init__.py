"""The model that ships with Saccade, and the images that the demo asks about."""

from importlib.resources import files
from pathlib import Path


def bundled(name: str) -> Path:
    """Return the folder *name*, `model` or `images`."""
    return Path(str(files(__name__).joinpath(name)))
