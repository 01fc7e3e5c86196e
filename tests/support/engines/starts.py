"""A start on a GPU, played on a CPU: all that prepares a loaded model, but no trial of backends."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from saccade.engine.executor.loader import LoadedModel
from saccade.nn.backends import Workload

CPU = torch.device("cpu")


class OnGpu:
    """A network on the CPU that says that it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, network: Any) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def on_gpu(model: LoadedModel) -> LoadedModel:
    return replace(model, network=OnGpu(model.network))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `prepare_execution` take PyTorch's attention, and leave the environment alone."""

    def tried(load: Any, _: str, workload: Workload, __: object) -> tuple[Any, Workload]:
        return load("torch_sdpa", replace(workload, device=CPU)), workload

    monkeypatch.setattr("saccade.engine.executor.execution.tried", tried)
    monkeypatch.setattr("saccade.engine.executor.execution.use_toolkit", lambda *_: None)
