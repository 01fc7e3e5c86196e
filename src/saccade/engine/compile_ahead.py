"""Compile the kernels that an engine needs, ahead of its start.

This module runs a complete start, so it needs no list of kernels.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from saccade.engine.config import EngineConfig, EngineSettings
from saccade.engine.executor.weight_filler import Progress
from saccade.engine.executor.weight_formats import read_quantisation
from saccade.engine.startup import start
from saccade.errors import StartupError
from saccade.models.files import parse_json, read_model_files, with_overrides
from saccade.nn.backends.compilers import find_toolkit
from saccade.nn.backends.kernel_caches import kernel_caches
from saccade.protocol.description import Description
from saccade.protocol.model_files import CONFIG

WORDS_OF_ABSENT = {"nvcc": "nvcc (the CUDA toolkit)"}


class Stage(NamedTuple):
    """A stage of an engine's start: its wall-clock *seconds*, and how many *kernels* of each kind it compiled."""

    name: str
    seconds: float
    kernels: Mapping[str, int]


class StageLog:
    """A Progress that records each stage, and passes all reports on. Call `end_stage` after the last one."""

    def __init__(self, progress: Progress, seconds: Callable[[], float] = time.monotonic) -> None:
        self.stages: list[Stage] = []
        self._progress, self._seconds = progress, seconds
        self._name, self._began, self._counts = "", seconds(), _counts()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Record *stage* if it is new, and pass the report on."""
        if stage != self._name:
            self.end_stage()
            self._name = stage
        self._progress(stage, done, total)

    def end_stage(self) -> None:
        """Record the stage that ends now."""
        now, counts = self._seconds(), _counts()
        if self._name:
            self.stages.append(Stage(self._name, now - self._began, counts - self._counts))
        self._began, self._counts = now, counts


def needs_weights(folder: Path, config: EngineSettings) -> bool:
    """Return whether the kernels for the model in *folder* depend on its weights; those of a quantised checkpoint do.

    Only the weight files say which matrices are quantised. Raises StartupError.
    """
    files = with_overrides(read_model_files(folder), config.hf_overrides, None, implementation=config.model_impl)
    return read_quantisation(parse_json(files, CONFIG), folder) is not None


def refuse_without_gpu(config: EngineSettings) -> None:
    """Raise StartupError if an engine with *config* would use no GPU on this machine."""
    if config.device == "cpu":
        raise StartupError(
            "--device cpu: this command is for GPUs. On a CPU, a first start compiles one kernel at most, in seconds."
        )
    if torch.cuda.is_available():
        return
    build = "" if torch.version.cuda else " (this torch is a build for CPUs)"
    absent = [f"a GPU that torch finds{build}", *(WORDS_OF_ABSENT.get(one, one) for one in find_toolkit().absent())]
    raise StartupError(
        "Kernels are compiled on the kind of GPU that they are for, because libraries choose them by the GPU that they "
        f"see. This machine lacks {', '.join(absent)}. Run this command on one that has all, and take the folders that "
        'it names from there; "Compiling ahead" in docs/gpu.md says how.'
    )


def compile_ahead(config: EngineConfig, progress: Progress) -> tuple[Description, list[Stage]]:
    """Start an engine with *config*, close it, and return its description and the stages of its start.

    Raises StartupError.
    """
    refuse_without_gpu(config)
    log = StageLog(progress)
    engine = start(dataclasses.replace(config, record_steps=None, record_pixels=False, device="cuda"), log)
    log.end_stage()
    engine.close()
    return engine.description, log.stages


def _counts() -> Counter[str]:
    return Counter({name: count for cache in kernel_caches() for name, count in cache.counts().items()})
