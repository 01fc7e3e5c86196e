"""Finds this machine's GPUs without torch."""

from pathlib import Path

DEVICES = ("nvidia*", "dxg")
"""Device files of the NVIDIA driver; under WSL dxg."""

GPU_DEVICE = "nvidia[0-9]*"
"""One for each GPU; WSL has none."""


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether *devices* has an NVIDIA GPU, without torch."""
    return any(next(devices.glob(pattern), None) for pattern in DEVICES)


def num_gpus(devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA GPUs *devices* has, without torch; 0 under WSL."""
    return sum(1 for _ in devices.glob(GPU_DEVICE))
