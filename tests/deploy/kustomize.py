"""What `kubectl kustomize` makes of our folders, as far as they use it: resources, JSON patches and deletions."""

import copy
from pathlib import Path
from typing import Any

import yaml

Manifests = dict[tuple[str, str], Any]


def render(folder: Path) -> Manifests:
    """Return the manifests of a folder with a kustomization.yaml by kind and name."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "patches"}
    manifests: Manifests = {}
    for resource in kustomization["resources"]:
        path = folder / resource
        added = render(path) if path.is_dir() else _read(path)
        assert not added.keys() & manifests.keys()
        manifests |= added
    for patch in kustomization.get("patches", ()):
        key = patch["target"]["kind"], patch["target"]["name"]
        match yaml.safe_load(patch["patch"]):
            case {"$patch": "delete", "kind": kind, "metadata": {"name": name}}:
                assert (kind, name) == key
                del manifests[key]
            case operations:
                for operation in operations:
                    _apply(manifests[key], **operation)
    return manifests


def _read(file: Path) -> Manifests:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(file.read_text())}


def _apply(target: Any, op: str, path: str, value: Any) -> None:
    *way, last = path.strip("/").split("/")
    for step in way:
        target = target[int(step) if isinstance(target, list) else step]
    if op == "add" and last == "-":
        target.append(copy.deepcopy(value))
        return
    key = int(last) if isinstance(target, list) else last
    match op:
        case "add" if isinstance(target, dict):
            target[key] = copy.deepcopy(value)
        case "replace":
            assert target[key] is not None
            target[key] = copy.deepcopy(value)
        case "test":
            assert target[key] == value
        case _:
            raise ValueError(op)
