"""The parts that kernels for quantised weights share: checks of a layer's parts, and the steps after a product.

Shapes: N tokens, I inputs, O outputs.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from saccade.nn.formats.fp8 import LARGEST
from saccade.nn.formats.quantised import Part, QuantisedWeight
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import Activation, PackedLinear


class Product(PackedLinear):
    """A PackedLinear that adds the bias and the activation to a kernel's product."""

    bias_O: torch.Tensor | None

    @abstractmethod
    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""
        output_NO = self.product(x_NI.contiguous())
        if self.bias_O is not None:
            output_NO = output_NO + self.bias_O
        return output_NO if activation is None else activation(output_NO)


def aligned(parts: Sequence[Part], rows: int, columns: int) -> list[QuantisedWeight]:
    """Return *parts* if they consist of whole cells of *rows* x *columns*. Only the last may end within a cell's rows.

    Raises Unavailable for other parts.
    """
    weights = [part for part in parts if isinstance(part, QuantisedWeight)]
    inner = [weight.region for weight in weights]
    heights = [region.row for region in inner] + [region.num_rows for region in inner[:-1]]
    widths = [width for region in inner for width in (region.column, region.num_columns)]
    if any(height % rows for height in heights) or any(width % columns for width in widths):
        raise Unavailable(f"its parts are not in whole cells of {rows} x {columns}")
    return weights


def field_of(weights: Sequence[QuantisedWeight], name: str) -> torch.Tensor:
    """Return the field *name* of *weights*, one below the other."""
    fields = [weight.fields[name] for weight in weights]
    if len(fields) == 1:
        return fields[0]
    return torch.cat([one.view(torch.uint8) for one in fields], -2).view(fields[0].dtype)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the compute capability of the GPU that holds *tensor*."""
    return torch.cuda.get_device_capability(tensor.device)


def num_multiprocessors(tensor: torch.Tensor) -> int:
    """Return the number of multiprocessors of the GPU that holds *tensor*."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def rounded_to_fp8(x_NI: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return *x_NI* in e4m3, and the float32 scales [N, I / group] of its groups of columns."""
    x_NGC = x_NI.float().unflatten(-1, (-1, group))
    scales_NG = x_NGC.abs().amax(-1).clamp_min(1e-10) / LARGEST
    values = (x_NGC / scales_NG.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn).flatten(-2), scales_NG
