"""Builds of torch for tests, without torch."""

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path


def build(folder: Path, library: str) -> Distribution:
    """A build of torch, as pip lays it out."""
    information = folder / "torch-2.13.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "lib" / library).touch()
    return PathDistribution(information)
