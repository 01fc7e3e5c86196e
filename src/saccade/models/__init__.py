"""One folder per model family; this module finds them."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
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


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of a parsed config.json: by its architecture, else by its model_type. Raises StartupError."""
    match config.get("architectures"):
        case [str(name)]:
            return find(name)
        case None | []:
            return find_by_type(str(config.get("model_type")))
        case given:
            raise StartupError(f"config.json: `architectures` must name exactly one architecture, not {given!r}.")


def find_by_type(model_type: str) -> str:
    """Return the folder name of the one family that serves *model_type*. Raises StartupError."""
    known = families()
    matches = [name for name, family in known.items() if model_type in family.model_types]
    if len(matches) != 1:
        claimed = sorted(kind for family in known.values() for kind in family.model_types)
        raise StartupError(
            f"config.json names no `architectures`, and no one family serves its model_type {model_type!r}. "
            f"Known: {', '.join(claimed)}."
        )
    return matches[0]


def load_layout(name: str) -> type[Layout]:
    """Return the part of the family that runs in the gateway. No torch."""
    part: type[Layout] = importlib.import_module(f"{__name__}.{name}.layout").Layout
    return part


def load_pixels(name: str) -> type[Pixels]:
    """Return the part of the family that runs in a decode process."""
    part: type[Pixels] = importlib.import_module(f"{__name__}.{name}.pixels").Pixels
    return part


def has_network(name: str) -> bool:
    """Tell whether our own engine runs the family; others are served over workers of other makes."""
    return importlib.util.find_spec(f"{__name__}.{name}.network") is not None


def load_network(name: str) -> Any:
    """Return the part of the family that runs in the engine. Imports torch. Raises StartupError where there is none."""
    if not has_network(name):
        runs = [arch for known, family in families().items() if has_network(known) for arch in family.architectures]
        raise StartupError(
            f"Saccade's engine does not run {name} yet; it runs {', '.join(runs)}. A gateway serves {name} over workers"
            " of other makes."
        )
    return importlib.import_module(f"{__name__}.{name}.network").Network
