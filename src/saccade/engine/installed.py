"""Checks whether the packages that only the engine needs are installed. A gateway runs without them."""

from importlib.util import find_spec

from saccade.errors import NotInstalled

PACKAGES = ("torch", "safetensors")
"""What the extra `engine` installs."""


def has_engine() -> bool:
    """Return whether all PACKAGES are installed, without importing them."""
    return all(find_spec(name) is not None for name in PACKAGES)


def require_engine(needed_by: str = "This") -> None:
    """Raise NotInstalled if this installation cannot run models; the error's sentence begins with *needed_by*."""
    if not has_engine():
        raise NotInstalled(
            f"{needed_by} needs the engine: pip install 'saccade-vlm[engine]'; \"Install\" in README.md names the "
            "build of torch to install first."
        )
