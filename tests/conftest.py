"""What every test may use: tiny checkpoints, made once."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells of each connection that a server closes
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton computes on the CPU
# Kernels are compiled once for all processes of all runs, and nothing is left in the user's own folder.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / ".cache")

import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis
import pytest
import structlog
import torch
from conformance_sample import pytest_addoption, pytest_collection_modifyitems, pytest_configure, share
from conformance_table import aspect, print_table, pytest_sessionfinish
from torchvision_schemas import import_torchvision
from xdist.scheduler import LoadFileScheduling

__all__ = [
    "aspect",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_sessionfinish",
    "share",
]

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell sets this for commands in the background. Tests interrupt themselves and what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Structlog's own choice shows the values of all variables: many seconds for a traceback through a network.
plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])
import_torchvision()  # before anything imports transformers, which would fail on the first try and remember it


class ByFile(LoadFileScheduling):
    """Each file is one process's, and all files that use tiny_server are the same one's, so that it starts once.

    Tests of a fuzz take minutes in conformance, and are dealt one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        if file.endswith("_fuzz.py"):
            return nodeid
        return "tiny_server" if _uses_tiny_server(file) else file


@cache
def _uses_tiny_server(file: str) -> bool:
    return "tiny_server" in Path(__file__).parent.parent.joinpath(file).read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """How files are dealt to processes."""
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of conformance, and how many tests were skipped for which reason."""
    print_table(terminalreporter)
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} {reason[0].lower()}{reason[1:]}")


@pytest.fixture(scope="session")
def tiny_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-VL in hub layout, float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations at import
        import checkpoints

        return checkpoints.write_qwen3_vl(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3-vl")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a release's files without weights, by its name in checkpoints.CHECKPOINTS; made when first asked."""
    import checkpoints

    @cache
    def folder(name: str) -> Path:
        return checkpoints.CHECKPOINTS[name](tmp_path_factory.mktemp(name))

    return folder


@pytest.fixture(scope="session")
def network_folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Callable[[str], Path]:
    """The folder of a whole tiny checkpoint, by its name in checkpoints.NETWORKS or TEXTS; made when first asked."""
    import checkpoints

    @cache
    def folder(name: str) -> Path:
        if name == "qwen3_vl":
            return tiny_qwen3_vl
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns about its own deprecations at import
            writer = {**checkpoints.NETWORKS, **checkpoints.TEXTS}[name]
            return writer(tmp_path_factory.mktemp("checkpoints") / name)

    return folder
