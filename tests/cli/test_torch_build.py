"""A CUDA build of torch on a machine without a GPU is said at start."""

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from saccade.cli.torch_build import installed_torch, unused_cuda


def build(folder: Path, library: str) -> Distribution:
    """A build of torch, as pip lays it out."""
    information = folder / "torch-2.13.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "lib" / library).touch()
    return PathDistribution(information)


@pytest.mark.parametrize(
    ("library", "device", "said"),
    [
        ("libtorch_cuda.so", "null", True),
        ("libtorch_cuda.so", "nvidia0", False),
        ("libtorch_cuda.so", "nvidiactl", False),
        ("libtorch_cuda.so", "dxg", False),
        ("libtorch_cpu.so", "null", False),
    ],
)
def test_cuda_build_without_gpu(tmp_path: Path, library: str, device: str, said: bool) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / device).touch()
    sentence = unused_cuda(build(tmp_path, library), devices)
    assert (sentence is not None) is said
    assert sentence is None or "torch 2.13.0 is the large build" in sentence


def test_torch_is_found_without_importing_it() -> None:
    torch = installed_torch()
    assert torch is not None
    assert Path(str(torch.locate_file("torch/__init__.py"))).exists()


def test_missing_torch_is_no_cuda_build() -> None:
    assert unused_cuda(None) is None
