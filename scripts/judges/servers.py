"""`saccade serve` of this checkout for a judge: on loopback, ended with the run."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from checkpoints import write_qwen3_vl
from server import Server, serving

__all__ = ["Server", "bundled_server", "tiny_server"]


@contextlib.contextmanager
def bundled_server(names: Iterable[str], *flags: str, key: str = "none") -> Iterator[Server]:
    """Serve the model that ships by *names*, too."""
    with serving(*_names(names), "--no-summary", *flags, key=key) as server:
        yield server


@contextlib.contextmanager
def tiny_server(folder: Path, names: Iterable[str], *flags: str) -> Iterator[Server]:
    """Serve a random Qwen3-VL, written into *folder*, by *names*, too."""
    with serving(str(write_qwen3_vl(folder / "tiny-qwen3-vl")), *_names(names), "--no-summary", *flags) as server:
        yield server


def _names(names: Iterable[str]) -> list[str]:
    return [word for name in names for word in ("--served-model-name", name)]
