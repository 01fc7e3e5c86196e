"""A CUDA build of torch on a machine without a GPU is said at start."""

from pathlib import Path

import pytest
from torch_builds import build

from saccade.cli.torch_build import installed_torch, unused_cuda


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
