"""Tells from torch's files, without importing it, whether its build fits the machine."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

CUDA_LIBRARY = "torch/lib/libtorch_cuda.so"
DEVICES = ("nvidia*", "dxg")
"""What the driver makes in /dev; under WSL it is dxg."""


def installed_torch() -> Distribution | None:
    """Return torch as it is installed here."""
    try:
        return distribution("torch")
    except PackageNotFoundError:
        return None


def unused_cuda(torch: Distribution | None, devices: Path = Path("/dev")) -> str | None:
    """Return a sentence where *torch* is a CUDA build and *devices* has no NVIDIA GPU, else None."""
    if torch is None or not Path(str(torch.locate_file(CUDA_LIBRARY))).exists():
        return None
    if any(next(devices.glob(pattern), None) for pattern in DEVICES):
        return None
    return (
        f"torch {torch.version} is the large build for NVIDIA GPUs, and this machine has none: the model runs on the "
        'CPU. "Install" in README.md says how to get the small build.'
    )
