"""Networks, and parts of them, filled from safetensors files."""

from pathlib import Path

import torch

from saccade.engine.executor.weight_files import open_files
from saccade.engine.executor.weight_filler import fill
from saccade.engine.executor.weight_formats import Quantisation
from saccade.engine.executor.weight_plan import make_plan
from saccade.nn.parallel import ALONE, Ranks


def fill_from(
    network: torch.nn.Module, *paths: Path, quantisation: Quantisation | None = None, ranks: Ranks = ALONE
) -> None:
    """Fill the parameters of *network*, which has a method `locate`, from all tensors of the files."""
    with open_files(paths) as checkpoint:
        plan = make_plan(network, checkpoint, quantisation, ranks)
        fill(network, plan, checkpoint, torch.device("cpu"), lambda *_: None)
