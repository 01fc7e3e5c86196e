"""Finds the images in a folder that a user names."""

from pathlib import Path

from saccade.errors import StartupError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def image_files(folder: Path) -> list[Path]:
    """Return the images in *folder* and below it, ordered by path. Raises StartupError if it has none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise StartupError(f"--images {folder} has no images: files that end with {', '.join(SUFFIXES)}.")
    return files
