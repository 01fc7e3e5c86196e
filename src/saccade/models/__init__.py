"""Finds model families. Each family has a folder here, and some families share one."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from saccade.errors import NotInstalled, StartupError
from saccade.models.family import Family, Layout, Pixels, ProcessorPixels, VideoLayout, VideoPixels
from saccade.models.spec import MODEL_IMPL, ModelSpec

SHARED = frozenset({"backbones", "preprocessing", "tool_formats"})

OWN = "saccade"
"""The value of --model-impl for families that know the architecture, and no other."""


@cache
def _declared() -> dict[str, tuple[str, Family]]:
    """Return each family's folder and declaration, by the family's name.

    A folder declares several families in FAMILIES, or a single one, with the folder's name, in FAMILY. The result is
    cached, because confined processes cannot list folders.
    """
    by_name: dict[str, tuple[str, Family]] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg and module.name not in SHARED:
            package = importlib.import_module(f"{__name__}.{module.name}")
            in_folder = getattr(package, "FAMILIES", None) or {module.name: package.FAMILY}
            by_name |= {name: (module.name, family) for name, family in in_folder.items()}
    return dict(sorted(by_name.items()))


def families() -> dict[str, Family]:
    """Return every family by its name. Does not import torch."""
    return {name: family for name, (_, family) in _declared().items()}


def declaration(name: str, layout: Layout) -> Family:
    """Return the declaration of the family *name* for the checkpoint with *layout*.

    A folder's `declare` completes it, if it has one.
    """
    declare = getattr(importlib.import_module(f"{__name__}.{folder_of(name)}"), "declare", None)
    return families()[name] if declare is None else declare(layout.settings)


def folder_of(name: str) -> str:
    """Return the folder of the family *name*."""
    return _declared()[name][0]


def _module(name: str, module: str) -> str:
    return f"{__name__}.{folder_of(name)}.{module}"


def _part(name: str, module: str, part: str) -> Any:
    """Return the class for *part* of the family *name*, from a *module* in its folder."""
    return getattr(importlib.import_module(_module(name, module)), families()[name].parts.get(part, part))


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family name for a parsed config.json. Raises StartupError.

    It is that of the library that --model-impl names, or else that of the architecture or the model_type. For others
    it is that of an installed library, if config.json names the token that stands for images.
    """
    if (library := config.get(MODEL_IMPL)) not in (None, OWN):
        return _of_library(str(library))
    match config.get("architectures"):
        case [str(claim)]:
            field, reason = "architectures", f"The architecture {claim!r} is not supported."
        case None | []:
            field, claim = "model_types", str(config.get("model_type"))
            reason = f"config.json has no `architectures`, and its model_type {claim!r} does not identify one family."
        case given:
            raise StartupError(f"config.json: `architectures` must name exactly one architecture, not {given!r}.")
    names = [name for name, family in families().items() if claim in getattr(family, field)]
    if len(names) == 1:
        return names[0]
    claimed = ", ".join(sorted(one for family in families().values() for one in getattr(family, field)))
    reason = f"{reason} Supported: {claimed}."
    if library == OWN:
        raise StartupError(reason)
    return _of_any_library(config, reason)


def _of_library(library: str) -> str:
    libraries = {family.library: name for name, family in families().items() if family.library is not None}
    if library not in libraries:
        known = ", ".join(("auto", OWN, *libraries))
        raise StartupError(f"--model-impl {library}: no family computes models by a library of this name. Use {known}.")
    return libraries[library]


def _of_any_library(config: Mapping[str, Any], reason: str) -> str:
    """Return the family of an installed library for an architecture that no family names, for *reason* refused."""
    for name, family in families().items():
        if family.library is None or all(config.get(key) is None for key in family.placeholder_keys):
            continue
        if importlib.util.find_spec(family.library) is None:
            raise NotInstalled(
                f"{reason} The library {family.library} may compute it, as with --model-impl {family.library}: pip "
                f"install 'saccade-vlm[{family.library}]'."
            )
        return name
    raise StartupError(reason)


def load_layout(name: str) -> type[Layout]:
    """Return the family's class that runs in the gateway. Does not import torch."""
    return _part(name, "layout", "Layout")  # type: ignore[no-any-return]


def load_pixels(name: str) -> type[Pixels]:
    """Return the family's class that runs in a decode process."""
    return _part(name, "pixels", "Pixels")  # type: ignore[no-any-return]


def load_processor_pixels(name: str) -> type[ProcessorPixels]:
    """Return the same of a library's family."""
    return _part(name, "pixels", "Pixels")  # type: ignore[no-any-return]


def takes_images(name: str) -> bool:
    """Return whether the family *name* takes images, not only text."""
    return families()[name].takes_images


def takes_videos(name: str) -> bool:
    """Return whether the family *name* takes videos."""
    return importlib.util.find_spec(_module(name, "video")) is not None


def load_video_layout(name: str) -> type[VideoLayout]:
    """Return the family's video class that runs in the gateway. The family must take videos. Does not import torch."""
    return _part(name, "video", "VideoLayout")  # type: ignore[no-any-return]


def load_video_pixels(name: str) -> type[VideoPixels]:
    """Return the family's video class that runs in a decode process. The family must take videos."""
    return _part(name, "pixels", "VideoPixels")  # type: ignore[no-any-return]


def has_network(name: str) -> bool:
    """Return whether Saccade's own engine runs the family *name*."""
    return importlib.util.find_spec(_module(name, "network")) is not None


def load_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec for a model of the family *name*. Does not import torch. Raises StartupError."""
    _check_has_network(name)
    return _part(name, "spec", "Spec").read_config(config)  # type: ignore[no-any-return]


def load_network(name: str) -> Any:
    """Return the family's network class. Imports torch. Raises StartupError if there is none."""
    _check_has_network(name)
    return _part(name, "network", "Network")


def _check_has_network(name: str) -> None:
    if not has_network(name):
        all_families = families()
        instead = (
            "Run the model in vLLM, SGLang or TokenSpeed, and give its address to `saccade gateway --worker-url`, such "
            "as tokenspeed://HOST:PORT."
            if all_families[name].external_grid
            else "No other worker that Saccade knows takes it either; `saccade inspect` shows its prompts and pixels."
        )
        architectures = ", ".join(all_families[name].architectures)
        runs = ", ".join(filter(has_network, all_families))
        raise StartupError(f"Saccade's engine does not run {architectures} ({name}); it runs {runs}. {instead}")
