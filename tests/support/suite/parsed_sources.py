"""The modules of Saccade as syntax trees, parsed once for all tests that judge the source."""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import saccade

ROOT = Path(saccade.__file__).parent


@cache
def parsed_modules() -> Mapping[Path, ast.Module]:
    """Return the tree of each module by its absolute path, but for what protoc writes."""
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py")) if path.parent.name != "proto"}
