"""The manifests of the base and of every overlay, and what our program makes of a container's arguments."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from kustomize import render

from saccade.cli.main import make_app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PAGES = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}
STAND_INS = {"SACCADE_API_KEY": "stand-in-for-a-key", "SACCADE_STATE": "postgresql://db/saccade"}
OVERLAYS = {folder.name: render(folder) for folder in sorted((FOLDER / "overlays").iterdir())}
MANIFESTS = render(FOLDER / "base")


def pod(name: str, manifests: Any = MANIFESTS) -> Any:
    return manifests["Deployment", name]["spec"]["template"]["spec"]


def container(name: str, manifests: Any = MANIFESTS) -> Any:
    (one,) = pod(name, manifests)["containers"]
    return one


def arguments_of(words: Iterable[str]) -> dict[str, Any]:
    """What our program makes of *words*, the fields of its groups of flags included."""
    _, bound, _ = make_app(None).parse_args(list(words), exit_on_error=False, print_error=False)
    given = dict(bound.arguments)
    values = list(given.values())
    for value in values:
        if hasattr(value, "__dataclass_fields__"):
            given |= vars(value)
            values.extend(vars(value).values())  # groups within a group
    return given


def arguments(name: str, manifests: Any = MANIFESTS) -> dict[str, Any]:
    """What our program makes of a container's arguments."""
    one = container(name, manifests)
    with pytest.MonkeyPatch.context() as environment:
        for variable in one.get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                environment.setenv(variable["name"], STAND_INS.get(variable["name"], "stand-in"))
        return arguments_of(word.replace("$(POD_IP)", "10.0.0.5") for word in one["args"])


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def secret_of(name: str, variable: str, manifests: Any = MANIFESTS) -> Any:
    """The name and the key of the secret that is an environment variable of a container."""
    return next(one for one in container(name, manifests)["env"] if one["name"] == variable)["valueFrom"][
        "secretKeyRef"
    ]


def volume(name: str, volume_name: str, manifests: Any = MANIFESTS) -> Any:
    return next(one for one in pod(name, manifests)["volumes"] if one["name"] == volume_name)
