"""Benchmarks import what exists: most of them run too long for a test."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def is_importable(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.ci
def test_names_from_the_package_exist() -> None:
    missing = [
        f"{path.relative_to(FOLDER)}: {node.module}.{alias.name}"
        for path in sorted(FOLDER.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saccade")
        for alias in node.names
        if importlib.util.find_spec(node.module or "") is None or not is_importable(node.module or "", alias.name)
    ]
    assert missing == []
