"""Finds the installed release of Saccade."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "saccade-vlm"
"""The name for `pip install`; the program and the package are called saccade."""


def installed_version() -> str:
    """Return the installed release, or "unknown" if Saccade runs from a source tree without an installation."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
