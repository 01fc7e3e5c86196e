"""Check, without importing torch, whether its build fits the machine."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from saccade.engine.gpu_devices import has_gpu

CUDA_LIBRARY = "torch/lib/libtorch_cuda.so"


def installed_torch() -> Distribution | None:
    """Return the installed distribution of torch, or None if there is none."""
    try:
        return distribution("torch")
    except PackageNotFoundError:
        return None


def unused_cuda(torch: Distribution | None, devices: Path = Path("/dev")) -> str | None:
    """Return a warning if *torch* is a CUDA build and *devices* has no NVIDIA GPU, else None."""
    if torch is None or not Path(str(torch.locate_file(CUDA_LIBRARY))).exists():
        return None
    if has_gpu(devices):
        return None
    return (
        f"torch {torch.version} is the large build for NVIDIA GPUs, but this machine has none: the model runs on the "
        'CPU. "Install" in README.md describes how to install the small build.'
    )
