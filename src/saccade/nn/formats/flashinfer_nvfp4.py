"""Products with NVFP4 weights on Blackwell by FlashInfer, and mixtures of experts with such weights.

Activations are rounded to NVFP4 too, with the checkpoint's scale for them. FlashInfer takes the scales of groups in
tiles of 128 rows and 4 groups. Source of the arguments: flashinfer/gemm/gemm_base.py, quantization/fp4_quantization.py
and fused_moe/core.py, release 0.7.2. It has never run on a GPU; tests/real checks its calls against the releases'
own signatures. Shapes: N tokens, I inputs, O outputs, G groups of columns, E experts, K experts of a token.
"""

from dataclasses import dataclass

import torch
from flashinfer import mm_fp4, nvfp4_quantize
from flashinfer.fused_moe import cutlass_fused_moe
from torch.nn import functional

from saccade.nn.formats.nvfp4 import Nvfp4
from saccade.nn.formats.products import Product, aligned, capability, field_of
from saccade.nn.formats.quantised import Part, QuantisedExperts, QuantisedLinear, QuantisedWeight
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import ExpertShare, PackedExperts

MAJORS = (10, 11, 12)
ALIGNMENT = 32
TILE_ROWS, TILE_GROUPS, INNER_ROWS = 128, 4, 32


@dataclass(frozen=True)
class Nvfp4Product(Product):
    """An NVFP4 linear layer: *weight_OB* uint8 has two values per byte, and *scales* are those of its groups in tiles.

    *to_fp4* multiplies activations before they are rounded, and *factor* the product; both are float32 [1].
    """

    weight_OB: torch.Tensor
    scales: torch.Tensor
    to_fp4: torch.Tensor
    factor: torch.Tensor
    bias_O: torch.Tensor | None

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""
        values_NB, scales = nvfp4_quantize(x_NI, self.to_fp4)
        return mm_fp4(values_NB, self.weight_OB.t(), scales, self.scales.t(), self.factor, x_NI.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Nvfp4Experts(PackedExperts):
    """Experts in NVFP4: *up_gate* [E, 2I, H / 2] has the ups first; *down* is [E, H, I / 2].

    *scales* are the six that FlashInfer takes: for each matrix those of activations, groups (in tiles) and products.
    """

    up_gate: torch.Tensor
    down: torch.Tensor
    scales: list[torch.Tensor]
    share: ExpertShare

    def apply(self, x_NE: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of this rank's experts, [N, H]."""
        outputs = cutlass_fused_moe(
            x_NE,
            expert_ids_NK.int(),
            weights_NK.float(),
            self.up_gate.view(torch.int64),
            self.down.view(torch.int64),
            x_NE.dtype,
            self.scales,
            ep_size=self.share.num_ranks,
            ep_rank=self.share.rank,
            use_fused_finalize=False,
        )
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def pack_linear(layer: QuantisedLinear) -> Nvfp4Product:
    """Return the product for *layer*. Raises Unavailable."""
    values, scales, of_input, whole = _joined(layer.parts)
    return Nvfp4Product(values, in_tiles(scales), 1 / of_input.view(1), (of_input * whole).view(1), layer.bias_O)


def pack_experts(gate_up: QuantisedExperts, down: QuantisedExperts, share: ExpertShare) -> Nvfp4Experts:
    """Return the mixture of experts. Raises Unavailable."""
    scales = []
    values = []
    for parts in (gate_up.parts[::-1], down.parts):
        weight, of_groups, of_input, whole = _joined(parts)
        values.append(weight)
        scales += [1 / of_input, in_tiles(of_groups).view(torch.int32), of_input * whole]
    return Nvfp4Experts(values[0], values[1], scales, share)


def in_tiles(scales_OG: torch.Tensor) -> torch.Tensor:
    """Return e4m3 scales [..., O, G] as bytes in tiles, padded to whole tiles."""
    rows, groups = scales_OG.shape[-2:]
    padded = functional.pad(scales_OG.view(torch.uint8), (0, -groups % TILE_GROUPS, 0, -rows % TILE_ROWS))
    tiles = padded.unflatten(-1, (-1, TILE_GROUPS)).unflatten(-3, (-1, TILE_ROWS // INNER_ROWS, INNER_ROWS))
    # [..., tiles, row / 32, row % 32, tiles, group] to [..., tiles, tiles, row % 32, row / 32, group]
    moved: torch.Tensor = tiles.movedim((-2, -3, -4), (-4, -3, -2))
    return moved.reshape(padded.shape)


def _joined(parts: tuple[Part, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, scales of groups, the activations' factor [], and the weight's factor [] or [E].

    Raises Unavailable.
    """
    weights = aligned(parts, 1, ALIGNMENT)
    if capability(next(iter(weights[0].fields.values())))[0] not in MAJORS:
        raise Unavailable("NVFP4 needs a Blackwell GPU")
    form = weights[0].format
    if not isinstance(form, Nvfp4):
        raise TypeError(f"{form.name} is no NVFP4.")
    if any(form.activation not in weight.fields for weight in weights):
        raise Unavailable("the checkpoint has no scale of its activations")
    values = field_of(weights, form.values)
    if values.shape[-2] % ALIGNMENT:
        raise Unavailable(f"its sides are no multiples of {ALIGNMENT}")
    wholes, inputs = ([_factor(weight, name) for weight in weights] for name in (form.whole, form.activation))
    if any(not torch.equal(wholes[0], one) for one in wholes):
        raise Unavailable("its parts have different scales")
    return values, field_of(weights, "weight_scale"), torch.stack(inputs).amax(), wholes[0]


def _factor(weight: QuantisedWeight, name: str) -> torch.Tensor:
    """Return the scale *name*, [] or [E], as a number to multiply values by."""
    scale = weight.fields[name].float()
    return 1 / scale if isinstance(weight.format, Nvfp4) and weight.format.is_divisor else scale
