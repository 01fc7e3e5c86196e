"""Networks, and parts of them, filled from safetensors files."""

from pathlib import Path

import torch
from references.formats import Tensors

from saccade.engine.executor.quantisation import Quantisation
from saccade.engine.executor.weight_files import open_files
from saccade.engine.executor.weight_filler import fill
from saccade.engine.executor.weight_plan import make_plan
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.int8 import Int8
from saccade.nn.formats.nvfp4 import Nvfp4
from saccade.nn.formats.packed_ints import awq, compressed, gptq
from saccade.nn.formats.quantised import WHOLE_ROW, QuantisedWeight, Region, WeightFormat
from saccade.nn.parallel import ALONE, Ranks

FORMATS: dict[str, WeightFormat] = {
    "int4": compressed(4, 32),
    "fp8": Fp8(),
    "nvfp4": Nvfp4(),
    "fp8 rows": Fp8((1, WHOLE_ROW), "weight_scale"),
    "fp8 tensor": Fp8(None, "weight_scale"),
    "int4 zeros": compressed(4, 32, symmetric=False),
    "int8 rows": compressed(8),
    "w8a8": Int8(),
    "awq": awq(32),
    "gptq": gptq(4, 32),
    "gptq int8": gptq(8, 32, zeros_offset=0),
    "nvfp4 packed": Nvfp4("nvfp4-pack-quantized", "weight_packed", "weight_global_scale", is_divisor=True),
}


def held(name: str, stored: Tensors, region: Region) -> QuantisedWeight:
    """The region of a weight, with those parts of its tensors that a loader reads."""
    form = FORMATS[name]
    ordered = {end: stored[end].t() if field.is_transposed else stored[end] for end, field in form.fields.items()}
    fields = {
        end: ordered[end][field.slices(region)].clone(memory_format=torch.contiguous_format)
        for end, field in form.fields.items()
    }
    return QuantisedWeight(form, fields, region)


def fill_from(
    network: torch.nn.Module, *paths: Path, quantisation: Quantisation | None = None, ranks: Ranks = ALONE
) -> None:
    """Fill the parameters of *network*, which has a method `locate`, from all tensors of the files."""
    with open_files(paths) as checkpoint:
        plan = make_plan(network, checkpoint, quantisation, ranks)
        fill(network, plan, checkpoint, torch.device("cpu"), lambda *_: None)
