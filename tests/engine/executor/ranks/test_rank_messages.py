"""What crosses the border between two ranks, and what does not."""

import socket

import pytest
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import EncoderInput, StepInput
from saccade.engine.executor.ranks import messages
from saccade.transport.framing import ChannelClosed


def step(grid: object) -> StepInput:
    return StepInput(7, images=(EncoderInput(5, "image", grid, None, b"abc"),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sent",
    [
        messages.LoadWeights(EngineConfig("folder", "name", tensor_parallel_size=3, aliases=("other",))),
        messages.Launch(step((1, 2, 3)), (messages.PixelsPlace(5, 0, 3),)),
        messages.Allocate(9),
    ],
)
def test_commands_arrive_unchanged(sent: messages.Command) -> None:
    ours, theirs = (messages.Link(end) for end in socket.socketpair())
    ours.send_frame(messages.encode(sent))
    assert theirs.command() == sent
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.command()
    theirs.close()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_no_tensor_crosses_on_any_device(device: str) -> None:
    grid = torch.ones(3, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match=f"A tensor on {device} cannot cross"):
        messages.encode(messages.Launch(step(grid), ()))
