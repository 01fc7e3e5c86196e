"""Programs for which torch and safetensors are not installed: put *sitecustomize.py* of `folder()` first on PYTHONPATH."""

from pathlib import Path

SITECUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

NAMES = ("torch", "torchvision", "safetensors", "numba", "triton")


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in NAMES else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context):
        return () if context.name in NAMES else super().find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def write(folder: Path) -> str:
    """Fill *folder* and return the value of PYTHONPATH."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return str(folder)
