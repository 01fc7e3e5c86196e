"""`saccade serve` of this checkout for a judge: on loopback, ended with the run."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path += map(str, [Path(__file__).parents[2] / "tests", *Path(__file__).parents[2].glob("tests/support/*")])

from checkpoints import NETWORKS
from server import Server, serving

__all__ = ["Server", "bundled_server", "model_server", "tiny_model"]


@contextlib.contextmanager
def bundled_server(names: Iterable[str], *flags: str, key: str = "none") -> Iterator[Server]:
    """Serve the model that ships by *names*, too."""
    with serving(*_names(names), "--no-summary", *flags, key=key) as server:
        yield server


@contextlib.contextmanager
def model_server(model: Path, names: Iterable[str], *flags: str) -> Iterator[Server]:
    """Serve the model in the folder *model* by *names*."""
    with serving(str(model), *_names(names), "--no-summary", *flags) as server:
        yield server


def tiny_model(name: str) -> Callable[[Path], Path]:
    """Return what writes a random network of a release, by its name, below a folder, and returns the network's own."""
    return lambda folder: NETWORKS[name](folder / f"tiny-{name}")


def _names(names: Iterable[str]) -> list[str]:
    return [word for name in names for word in ("--served-model-name", name)]
