"""Draws a token for each row from its logits and a number between 0 and 1: in plain PyTorch, or by a Triton kernel.

The cumulative distribution, in the order of the vocabulary, maps the number to a token. So a draw depends on its row
alone. No library's sampling offers that: libraries draw their own random numbers. Shapes: R rows, V vocabulary, K the
largest top_k of the rows.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch

from saccade.nn.libraries import Unavailable, attempt
from saccade.nn.transfer import to_device

Draw = Callable[[torch.Tensor, torch.Tensor, npt.NDArray[np.float64]], torch.Tensor]

logger = structlog.get_logger(__name__)


def fastest(device: torch.device) -> Draw:
    """Return `draw`, or on a GPU the kernel if it can be imported."""
    if device.type != "cuda":
        return draw
    try:
        with attempt():
            kernel: Any = importlib.import_module("saccade.nn.gpu_draws")
    except Unavailable as error:
        logger.warning("an operation is slower than it could be", operation="draw", reason=error.reason)
        return draw
    return kernel.draw  # type: ignore[no-any-return]


def draw(logits_RV: torch.Tensor, greedy_R: torch.Tensor, settings_5R: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return a token id int64 for each row. A row with temperature 0 gets its id in *greedy_R*.

    *settings_5R* has the temperatures, top_p, limits of top_k (V for none), min_p, and the uniform numbers.
    """
    vocab_size = logits_RV.shape[1]
    temperature_R, top_p_R, limit_R, min_p_R, uniform_R = to_device(settings_5R, logits_RV.device)
    random_R = temperature_R > 0
    # Greedy rows are computed with the others and replaced at the end.
    scaled_RV = logits_RV / torch.where(random_R, temperature_R, 1.0).float().unsqueeze(1)
    if settings_5R[3].any():
        # The minimum is a probability of min_p times the largest, expressed as a difference of logits.
        least_R1 = scaled_RV.amax(dim=-1, keepdim=True) + min_p_R.log().float().unsqueeze(1)
        scaled_RV.masked_fill_(scaled_RV < least_R1, float("-inf"))
    # Logits are ranked only if a row is cut by top_k or top_p.
    restricted = settings_5R[2][(settings_5R[2] < vocab_size) | (settings_5R[1] < 1)]
    if len(restricted):
        scaled_RV = _cut(scaled_RV, limit_R.long(), top_p_R.float(), int(restricted.max()))
    cumulative_RV = scaled_RV.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_R1 = (uniform_R * cumulative_RV[:, -1]).unsqueeze(1)
    drawn_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1).clamp_(max=vocab_size - 1)
    return torch.where(random_R, drawn_R, greedy_R)


def _cut(scaled_RV: torch.Tensor, limit_R: torch.Tensor, top_p_R: torch.Tensor, width: int) -> torch.Tensor:
    """Set logits outside top_k, then outside top_p of the rest, to -inf. Equal logits are kept or removed together."""
    ranked_RK = scaled_RV.topk(width, dim=-1).values
    last_R1 = ranked_RK.gather(1, (limit_R.clamp(max=width) - 1).unsqueeze(1))
    limited_R1 = (limit_R <= width).unsqueeze(1)
    kept_RV = scaled_RV.masked_fill((scaled_RV < last_R1) & limited_R1, float("-inf"))
    total_R1 = kept_RV.logsumexp(dim=-1, keepdim=True)
    shares_RK = (ranked_RK - total_R1).exp()
    # A logit is needed while the sum before it is below top_p; the smallest needed logit is the threshold.
    needed_RK = shares_RK.cumsum(dim=-1) - shares_RK < top_p_R.unsqueeze(1)
    threshold_R1 = ranked_RK.masked_fill(~needed_RK, float("inf")).amin(dim=-1, keepdim=True)
    nucleus_R1 = (top_p_R < 1).unsqueeze(1)
    return kept_RV.masked_fill((kept_RV < threshold_R1) & nucleus_R1, float("-inf"))
