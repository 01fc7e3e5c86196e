"""Layers with quantised weights as loaded, for the tests of kernels that multiply them."""

import dataclasses

import torch
from references.formats import REFERENCES
from weights import FORMATS, held

from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedWeight, Region
from saccade.nn.layers import Linear
from saccade.nn.parallel import Ranks

BF16 = torch.bfloat16
HOPPER, BLACKWELL = (9, 0), (10, 0)
INPUTS, WIDTHS = 256, (256, 128, 128)
EXPERTS, HIDDEN, WIDTH, CHOICES = 4, 256, 512, 2
ON_BOTH = [name for name, form in FORMATS.items() if form.kind in ("fp8_blocks", "fp8_rows", "int4")]
ON_BLACKWELL = [name for name, form in FORMATS.items() if form.kind == "nvfp4"]
GPU_FORMATS = [(name, HOPPER) for name in ON_BOTH] + [(name, BLACKWELL) for name in ON_BOTH + ON_BLACKWELL]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def joined(name: str) -> tuple[QuantisedWeight, ...]:
    """Three parts with own scales, as of queries, keys and values; NVFP4's scale of the weight is the same in all."""
    parts = [REFERENCES[name].write(drawn(width, INPUTS, seed=width) * INPUTS**-0.5) for width in WIDTHS]
    for whole in ("weight_scale_2", "weight_global_scale"):
        for part in parts:
            if whole in part:
                part[whole] = parts[0][whole]
    for part in parts:
        # NVFP4 of activations of about 1: the largest scale is 448.
        part["input_scale"], part["input_global_scale"] = torch.tensor(0.01), torch.tensor([100.0])
    return tuple(held(name, part, Region(0, width, 0, INPUTS)) for part, width in zip(parts, WIDTHS, strict=True))


def layer_of(name: str) -> Linear:
    layer = Linear(INPUTS, WIDTHS).to(BF16)
    layer.bias.data = drawn(sum(WIDTHS), seed=5).to(BF16)
    layer.hold("weight", joined(name))
    return layer


def experts_of(name: str, rank: int = 0, num_ranks: int = 1) -> Experts:
    """A rank's experts; NVFP4's gates and ups have one scale of the weight."""
    layer = Experts(EXPERTS, HIDDEN, WIDTH, Ranks(rank, num_ranks)).to(BF16)
    stacks: dict[str, list[list[dict[str, torch.Tensor]]]] = {"gate_up_proj": [[], []], "down_proj": [[]]}
    own = range(layer.first, layer.first + len(layer.down_proj))
    for expert in own:
        for place, shape in ((stacks["gate_up_proj"][0], (WIDTH, HIDDEN)), (stacks["gate_up_proj"][1], (WIDTH, HIDDEN)),
                             (stacks["down_proj"][0], (HIDDEN, WIDTH))):  # fmt: skip
            seed = 10 * expert + len(place) + 100 * (place is stacks["gate_up_proj"][1])
            place.append(REFERENCES[name].write(drawn(*shape, seed=seed) * shape[1] ** -0.5))
    if "weight_scale_2" in stacks["down_proj"][0][0]:
        for gate, up in zip(*stacks["gate_up_proj"], strict=True):
            up["weight_scale_2"] = gate["weight_scale_2"]
    for matrix, parts in stacks.items():
        shape = (HIDDEN, WIDTH) if matrix == "down_proj" else (WIDTH, HIDDEN)
        held_parts = []
        for part in parts:
            each = [held(name, one, Region(0, shape[0], 0, shape[1])) for one in part]
            fields = {end: torch.stack([one.fields[end] for one in each]) for end in each[0].fields}
            held_parts.append(dataclasses.replace(each[0], fields=fields))
        layer.hold(matrix, tuple(held_parts))
    return layer
