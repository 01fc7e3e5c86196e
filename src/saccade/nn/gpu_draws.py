"""Draws (saccade.nn.draws) on a GPU in one launch, by Triton.

Numbers are float32, and the sums of tiles are added in float64. A row's draw does not depend on other rows. It is the
same as on a CPU, unless the row's number lies within a rounding error of the border between two tokens. It has never
run on a GPU.
"""

import numpy as np
import numpy.typing as npt
import torch

from saccade.nn.backends.compilers import no_c_compiler
from saccade.nn.backends.triton_draws import draw_kernel
from saccade.nn.transfer import to_device

TILE, TRIES, WARPS = 2048, 8, 32
"""Logits of a row that its program looks at together, numbers that it tries in a pass, and its warps."""

if (reason := no_c_compiler()) is not None:
    raise ImportError(reason)


def draw(logits_RV: torch.Tensor, greedy_R: torch.Tensor, settings_5R: npt.NDArray[np.float64]) -> torch.Tensor:
    """Compute draws.draw for logits in float32."""
    num_rows, vocab_size = logits_RV.shape
    drawn_R = torch.empty_like(greedy_R)
    settings = to_device(settings_5R, logits_RV.device)
    draw_kernel[(num_rows,)](
        *(logits_RV, greedy_R, settings, drawn_R, vocab_size, logits_RV.stride(0)),
        TILE=TILE,
        TRIES=TRIES,
        num_warps=WARPS,
    )
    return drawn_R
