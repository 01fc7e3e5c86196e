"""One folder per model family; this module finds them."""

import importlib
import pkgutil
from typing import Any

from saccade.errors import StartupError
from saccade.models.family import Family, Layout, Pixels

SHARED = frozenset({"backbones", "preprocessing"})


def families() -> dict[str, Family]:
    """Return every family here, by folder name. Importing one costs no torch."""
    names = (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg and module.name not in SHARED)
    return {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in names}


def find(architecture: str) -> str:
    """Return the folder name of the family that serves *architecture* (config.json's spelling). Raises StartupError."""
    known = families()
    matches = [name for name, family in known.items() if architecture in family.architectures]
    if len(matches) != 1:
        claimed = sorted(arch for family in known.values() for arch in family.architectures)
        raise StartupError(f"No family serves the architecture {architecture!r}. Known: {', '.join(claimed)}.")
    return matches[0]


def load_layout(name: str) -> type[Layout]:
    """Return the part of the family that runs in the gateway. No torch."""
    part: type[Layout] = importlib.import_module(f"{__name__}.{name}.layout").Layout
    return part


def load_pixels(name: str) -> type[Pixels]:
    """Return the part of the family that runs in a decode process."""
    part: type[Pixels] = importlib.import_module(f"{__name__}.{name}.pixels").Pixels
    return part


def load_network(name: str) -> Any:
    """Return the part of the family that runs in the engine. Imports torch."""
    return importlib.import_module(f"{__name__}.{name}.network").Network
