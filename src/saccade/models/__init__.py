"""Find model families: each has a folder here."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.family import Family, Layout, Pixels, VideoLayout, VideoPixels
from saccade.models.spec import ModelSpec

SHARED = frozenset({"backbones", "preprocessing"})


def families() -> dict[str, Family]:
    """Return every family by its folder's name. Does not import torch."""
    names = (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg and module.name not in SHARED)
    return {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in names}


def find(architecture: str) -> str:
    """Return the folder name of the family of *architecture*, spelt as in config.json. Raises StartupError."""
    all_families = families()
    matches = [name for name, family in all_families.items() if architecture in family.architectures]
    if len(matches) != 1:
        claimed = sorted(arch for family in all_families.values() for arch in family.architectures)
        raise StartupError(f"The architecture {architecture!r} is not supported. Supported: {', '.join(claimed)}.")
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
    """Return the folder name of the only family with *model_type*. Raises StartupError."""
    all_families = families()
    matches = [name for name, family in all_families.items() if model_type in family.model_types]
    if len(matches) != 1:
        claimed = sorted(kind for family in all_families.values() for kind in family.model_types)
        raise StartupError(
            f"config.json has no `architectures`, and its model_type {model_type!r} does not identify one family. "
            f"Supported: {', '.join(claimed)}."
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


def takes_videos(name: str) -> bool:
    """Return whether the family *name* takes videos."""
    return importlib.util.find_spec(f"{__name__}.{name}.video") is not None


def load_video_layout(name: str) -> type[VideoLayout]:
    """Return the part for videos that runs in the gateway, of a family that takes them. No torch."""
    part: type[VideoLayout] = importlib.import_module(f"{__name__}.{name}.video").VideoLayout
    return part


def load_video_pixels(name: str) -> type[VideoPixels]:
    """Return the part for videos that runs in a decode process, of a family that takes them."""
    part: type[VideoPixels] = importlib.import_module(f"{__name__}.{name}.pixels").VideoPixels
    return part


def has_network(name: str) -> bool:
    """Return whether Saccade's own engine runs the family *name*."""
    return importlib.util.find_spec(f"{__name__}.{name}.network") is not None


def load_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a model of this family. No torch. Raises StartupError."""
    _check_has_network(name)
    spec: ModelSpec = importlib.import_module(f"{__name__}.{name}.spec").Spec.read(config)
    return spec


def load_network(name: str) -> Any:
    """Return the class of the family's network. Imports torch. Raises StartupError if there is none."""
    _check_has_network(name)
    return importlib.import_module(f"{__name__}.{name}.network").Network


def _check_has_network(name: str) -> None:
    if not has_network(name):
        all_families = families()
        instead = (
            "Run the model in TokenSpeed and give its address to `saccade gateway --worker-url tokenspeed://HOST:PORT`."
            if all_families[name].external_grid
            else "No other worker that Saccade knows takes it either; `saccade inspect` shows its prompts and pixels."
        )
        runs = ", ".join(filter(has_network, all_families))
        raise StartupError(f"Saccade's engine does not run {name}; it runs {runs}. {instead}")
