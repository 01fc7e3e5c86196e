"""Experts: fused and one by one, plain and in every format, on one rank and on two."""

import re
from pathlib import Path

import pytest
import torch
from references.formats import REFERENCES
from safetensors.torch import save_file
from tables import table
from torch import nn
from weights import FORMATS, fill_from

from saccade.engine.executor.quantisation import ModuleList, Quantisation
from saccade.errors import StartupError
from saccade.models.network import Target
from saccade.nn.experts import Experts
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.quantised import WeightFormat
from saccade.nn.parallel import ALONE, Ranks

Tensors = dict[str, torch.Tensor]
EXPERTS, HIDDEN, INTERMEDIATE = 6, 64, 96
ONE = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Toy(nn.Module):
    """A layer of experts, and a number."""

    def __init__(self, ranks: Ranks = ALONE, transposed: bool = False) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"experts": Experts(EXPERTS, HIDDEN, INTERMEDIATE, ranks)})
        self.number = nn.Parameter(torch.empty(()), requires_grad=False)
        self.transposed = transposed

    def locate(self, name: str) -> Target | None:
        if (match := ONE.fullmatch(name)) is not None:
            matrix, part = {"gate": ("gate_up", 0), "up": ("gate_up", 1), "down": ("down", None)}[match[2]]
            return Target(f"mlp.experts.{matrix}_proj", part, int(match[1]))
        return None if name.startswith("mtp.") else Target(name, transposed=self.transposed and "experts" in name)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """What every expert computes with, as the network stacks it."""
    draw = torch.Generator().manual_seed(0)
    return {
        "gate_up_proj": torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=draw),
        "down_proj": torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=draw),
    }


def one_by_one(weights: dict[str, torch.Tensor]) -> Tensors:
    """The tensors of a checkpoint that has each expert's matrices."""
    found = {}
    for expert in range(EXPERTS):
        gate, up = weights["gate_up_proj"][expert].chunk(2)
        for matrix, weight in (("gate", gate), ("up", up), ("down", weights["down_proj"][expert])):
            found[f"mlp.experts.{expert}.{matrix}_proj.weight"] = weight.contiguous()
    return found


def quantised(plain: Tensors, name: str) -> tuple[Tensors, Tensors]:
    """The same in a format, and what it stands for."""
    stored, values = {}, {}
    for key, weight in plain.items():
        fields = REFERENCES[name].write(weight)
        stored |= {key.removesuffix("weight") + end: field for end, field in fields.items()}
        values[key] = torch.from_numpy(REFERENCES[name].read(fields)).contiguous()
    return stored, values


def load(
    folder: Path,
    tensors: Tensors,
    form: str | WeightFormat | None = None,
    ranks: Ranks = ALONE,
    transposed: bool = False,
) -> Experts:
    save_file({"number": torch.tensor([3.0]), "mtp.unused": torch.ones(2), **tensors}, folder / "model.safetensors")
    with torch.device("meta"):
        network = Toy(ranks, transposed)
    known = FORMATS[form] if isinstance(form, str) else form
    quantisation = None if known is None else Quantisation(known, ModuleList(), "config.json")
    fill_from(network, folder / "model.safetensors", quantisation=quantisation, ranks=ranks)
    assert network.number == 3
    experts = network.mlp["experts"]
    assert isinstance(experts, Experts)
    return experts


def own_part(weights: dict[str, torch.Tensor], name: str, ranks: Ranks) -> torch.Tensor:
    """What a rank holds of the weights of all experts: whole experts, or of each an equal share of its width."""
    weight = weights[name]
    if EXPERTS % ranks.size == 0:
        return weight.chunk(ranks.size)[ranks.rank]
    if name == "down_proj":
        return weight.chunk(ranks.size, 2)[ranks.rank]
    return torch.cat([part.chunk(ranks.size, 1)[ranks.rank] for part in weight.chunk(2, 1)], 1)


RANKS = [ALONE, Ranks(0, 2), Ranks(1, 2), Ranks(3, 4)]
"""Two ranks share the experts, four share the width of each."""


@table("ranks", RANKS)
@table("layout", ["fused", "transposed", "one by one"])
def test_every_layout_is_cut_for_ranks(
    tmp_path: Path, weights: dict[str, torch.Tensor], layout: str, ranks: Ranks
) -> None:
    fused = {f"mlp.experts.{name}": weight for name, weight in weights.items()}
    tensors = {
        "fused": fused,
        "transposed": {name: weight.transpose(1, 2).contiguous() for name, weight in fused.items()},
        "one by one": one_by_one(weights),
    }[layout]
    experts = load(tmp_path, tensors, ranks=ranks, transposed=layout == "transposed")
    assert torch.equal(experts.gate_up_proj, own_part(weights, "gate_up_proj", ranks))
    assert torch.equal(experts.down_proj, own_part(weights, "down_proj", ranks))


@table("ranks", RANKS)
@table("name", FORMATS)
def test_every_format_is_cut_for_ranks(
    tmp_path: Path, weights: dict[str, torch.Tensor], name: str, ranks: Ranks
) -> None:
    stored, values = quantised(one_by_one(weights), name)
    experts = load(tmp_path, stored, name, ranks)
    assert experts.gate_up_proj.numel() == experts.down_proj.numel() == 0
    every = range(EXPERTS)
    gates, ups, downs = (
        [values[f"mlp.experts.{number}.{matrix}_proj.weight"] for number in every] for matrix in ("gate", "up", "down")
    )
    stacked = {"gate_up_proj": torch.cat((torch.stack(gates), torch.stack(ups)), 1), "down_proj": torch.stack(downs)}
    for matrix, held in experts.quantised.items():
        found = torch.stack([held[index] for index in range(len(held))])
        assert torch.equal(found, own_part(stacked, matrix, ranks)), matrix
    assert experts.quantised.keys() == stacked.keys()


def test_quantised_experts_equal_dequantised_ones(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    stored, values = quantised(one_by_one(weights), "int4")
    (tmp_path / "plain").mkdir()
    ours, plain = load(tmp_path, stored, "int4"), load(tmp_path / "plain", values)
    x, ids, shares = torch.randn(5, HIDDEN), torch.tensor([[1, 4]] * 4 + [[0, 5]]), torch.rand(5, 2)
    assert torch.equal(ours(x, ids, shares), plain(x, ids, shares))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mlp.experts.3.up_proj.weight_packed"), ["lacks 1", "mlp.experts.3.up_proj.weight_packed (I32)"]),
        (lambda t: [t.pop(name) for name in list(t) if ".experts.5." in name],
         ["lacks 3", "mlp.experts.gate_up_proj (part 1, expert 5)", "mlp.experts.down_proj (expert 5)"]),
        (lambda t: t.update({"mlp.experts.2.down_proj.weight": torch.ones(HIDDEN, INTERMEDIATE)}), ["same weight"]),
        (lambda t: t.update({"mlp.experts.2.down_proj.weight_scale": t["mlp.experts.2.down_proj.weight_scale"].float()}),
         ["mlp.experts.down_proj have several formats"]),
        (lambda t: t.update({"mlp.experts.6.down_proj.weight_packed": torch.ones(1)}), ["not know: mlp.experts.6.down"]),
    ],
)  # fmt: skip
def test_faulty_expert_tensors_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], change: object, words: list[str]
) -> None:
    stored, _ = quantised(one_by_one(weights), "int4")
    change(stored)  # type: ignore[operator]
    with pytest.raises(StartupError) as error:
        load(tmp_path, stored, "int4", Ranks(0, 2) if "expert 5" not in str(words) else ALONE)
    assert all(word in error.value.message for word in words), error.value.message


@table("bias", [torch.zeros(HIDDEN), torch.ones(HIDDEN)])
def test_bias_that_only_the_checkpoint_has(
    tmp_path: Path, weights: dict[str, torch.Tensor], bias: torch.Tensor
) -> None:
    """AutoGPTQ gives one to every layer; of zeros it changes nothing."""
    stored, _ = quantised(one_by_one(weights), "gptq")
    stored["mlp.experts.2.down_proj.bias"] = bias
    if bias.any():
        with pytest.raises(StartupError, match=r"not know: mlp\.experts\.2\.down_proj\.bias"):
            load(tmp_path, stored, "gptq")
    else:
        load(tmp_path, stored, "gptq")


def joined(weights: dict[str, torch.Tensor], transposed: bool) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """All experts in one tensor, with scales of BLOCKS, and what they stand for, as the network stacks it."""
    stored, values = {}, {}
    for name, weight in weights.items():
        own = (weight.transpose(1, 2) if transposed else weight).contiguous().to(torch.float8_e4m3fn)
        rows, columns = (-(-size // block) for size, block in zip(own.shape[1:], BLOCKS, strict=True))
        scales = torch.rand(EXPERTS, rows, columns, generator=torch.Generator().manual_seed(len(name))) + 0.5
        stored |= {f"mlp.experts.{name}": own, f"mlp.experts.{name}_scale_inv": scales}
        spread = scales.repeat_interleave(BLOCKS[0], 1).repeat_interleave(BLOCKS[1], 2)
        whole = own.float() * spread[:, : own.shape[1], : own.shape[2]]
        values[name] = whole.transpose(1, 2) if transposed else whole
    return stored, values


BLOCKS = (40, 28)
"""They divide neither the experts' widths nor a rank's part of them."""


@table("ranks", [ALONE, Ranks(1, 2), Ranks(3, 4)])
@table("transposed", [False, True])
def test_quantised_experts_in_one_tensor(
    tmp_path: Path, weights: dict[str, torch.Tensor], transposed: bool, ranks: Ranks
) -> None:
    stored, values = joined(weights, transposed)
    experts = load(tmp_path, stored, Fp8(BLOCKS), ranks, transposed)
    assert experts.gate_up_proj.numel() == experts.down_proj.numel() == 0
    for name in weights:
        held = experts.quantised[name]
        assert torch.equal(torch.stack([held[index] for index in range(len(held))]), own_part(values, name, ranks))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mlp.experts.down_proj_scale_inv"), ["lacks 1", "mlp.experts.down_proj_scale_inv (F32"]),
        (lambda t: t.pop("mlp.experts.gate_up_proj"), ["lacks 1", "mlp.experts.gate_up_proj (F8_E4M3)"]),
        (lambda t: t.update({"mlp.experts.down_proj_scale_inv": torch.ones(EXPERTS, 1, 1)}), ["[6, 1, 1]", "[6, 3, 3]"]),
        (lambda t: t.update({"mlp.experts.down_proj": torch.ones(EXPERTS, HIDDEN, INTERMEDIATE)}), ["[6, 64, 96]"]),
    ],
)  # fmt: skip
def test_faults_of_experts_in_one_tensor(
    tmp_path: Path, weights: dict[str, torch.Tensor], change: object, words: list[str]
) -> None:
    stored, _ = joined(weights, True)
    change(stored)  # type: ignore[operator]
    with pytest.raises(StartupError) as error:
        load(tmp_path, stored, Fp8(BLOCKS), transposed=True)
    assert all(word in error.value.message for word in words), error.value.message


@table("ranks", [ALONE, Ranks(1, 2), Ranks(3, 4)])
@table("is_quantised", [False, True])
@table("stored", [False, True])
@table("stated", [False, True])
@table("width", [96, HIDDEN, HIDDEN // 2])
def test_the_shapes_tell_which_way_round_experts_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    stated: bool,
    stored: bool,
    is_quantised: bool,
    ranks: Ranks,
) -> None:
    """Whatever the family says, and if one of the two matrices is square."""
    monkeypatch.setattr("test_weight_plan.INTERMEDIATE", width)
    draw = torch.Generator().manual_seed(0)
    plain = {
        "gate_up_proj": torch.randn(EXPERTS, 2 * width, HIDDEN, generator=draw),
        "down_proj": torch.randn(EXPERTS, HIDDEN, width, generator=draw),
    }
    fields, values = joined(plain, stored)
    if not is_quantised:
        fields = {
            f"mlp.experts.{name}": (value.transpose(1, 2) if stored else value).contiguous()
            for name, value in values.items()
        }
    experts = load(tmp_path, fields, Fp8(BLOCKS) if is_quantised else None, ranks, stated)
    for name in plain:
        held = experts.quantised.get(name, getattr(experts, name))
        assert torch.equal(torch.stack([held[index] for index in range(len(held))]), own_part(values, name, ranks))


def test_experts_that_do_not_agree_are_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    tensors = {f"mlp.experts.{name}": weight for name, weight in weights.items()}
    tensors["mlp.experts.down_proj"] = tensors["mlp.experts.down_proj"].transpose(1, 2).contiguous()
    with pytest.raises(StartupError, match=r"down_proj .* has shape \[6, 96, 64\] instead of \[6, 64, 96\]"):
        load(tmp_path, tensors)


NAMES = [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale"), ("weight_scale", None)]


@table("ranks", [ALONE, Ranks(1, 2), Ranks(3, 4)])
@table("names", NAMES)
@table("shape", [(), (1,), (1, 1)])
def test_one_scale_for_each_expert(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    names: tuple[str, str | None],
    shape: tuple[int, ...],
    ranks: Ranks,
) -> None:
    """Under all names of the scale, as a number or a vector or matrix of one."""
    stored, values = quantised(one_by_one(weights), "fp8 tensor")
    renamed = {"weight_scale": names[0], "input_scale": names[1]}
    tensors = {}
    for name, tensor in stored.items():
        module, _, end = name.rpartition(".")
        if (to := renamed.get(end, end)) is not None:
            tensors[f"{module}.{to}"] = tensor.reshape(shape) if end in renamed else tensor
    experts = load(tmp_path, tensors, "fp8 tensor", ranks)
    downs = torch.stack([values[f"mlp.experts.{number}.down_proj.weight"] for number in range(EXPERTS)])
    held = experts.quantised["down_proj"]
    found = torch.stack([held[index] for index in range(len(held))])
    assert torch.equal(found, own_part({"down_proj": downs}, "down_proj", ranks))


@table("ranks", [ALONE, Ranks(1, 2), Ranks(3, 4)])
@table(
    ("end", "shapes", "transposed"),
    [
        ("scale_inv", {"gate_up_proj": (2, 1), "down_proj": (1, 1)}, False),  # as transformers writes
        ("scale", {"gate_up_proj": (1, 1), "down_proj": ()}, False),
        ("weight_scale", {"gate_up_proj": (), "down_proj": (1,)}, True),
        ("scale", {"gate_up_proj": (2 * INTERMEDIATE, 1), "down_proj": (HIDDEN, 1)}, False),
    ],
)
def test_one_scale_for_each_expert_in_one_tensor(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    end: str,
    shapes: dict[str, tuple[int, ...]],
    transposed: bool,
    ranks: Ranks,
) -> None:
    stored, values = {}, {}
    for name, weight in weights.items():
        codes = weight.to(torch.float8_e4m3fn)
        draw = torch.Generator().manual_seed(len(name))
        scales = torch.rand(EXPERTS, *shapes[name], generator=draw) + 0.5
        rows = scales.reshape(EXPERTS, -1, 1)
        values[name] = codes.float() * rows.repeat_interleave(weight.shape[1] // rows.shape[1], 1)
        stored[f"mlp.experts.{name}"] = (codes.transpose(1, 2) if transposed else codes).contiguous()
        stored |= {f"mlp.experts.{name}_{end}": scales, f"mlp.experts.{name}_activation_scale": torch.ones(EXPERTS)}
    experts = load(tmp_path, stored, "fp8 tensor", ranks, transposed)
    for name in weights:
        held = experts.quantised[name]
        assert torch.equal(torch.stack([held[index] for index in range(len(held))]), own_part(values, name, ranks))


@table(("name", "count"), [("gate_up_proj", 3), ("gate_up_proj", 4), ("gate_up_proj", INTERMEDIATE), ("down_proj", 2)])
def test_other_numbers_of_scales_are_refused_by_name(
    tmp_path: Path, weights: dict[str, torch.Tensor], name: str, count: int
) -> None:
    """Also those that divide the rows: what each scale would belong to is not known."""
    stored: Tensors = {f"mlp.experts.{one}": weight.to(torch.float8_e4m3fn) for one, weight in weights.items()}
    stored |= {f"mlp.experts.{one}_scale": torch.ones(EXPERTS) for one in weights}
    stored[f"mlp.experts.{name}_scale"] = torch.ones(EXPERTS, count, 1)
    with pytest.raises(StartupError, match=rf"mlp\.experts\.{name}_scale .* has shape \[6, {count}, 1\] instead of"):
        load(tmp_path, stored, "fp8 tensor")


def test_two_names_of_one_scale(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    stored, _ = quantised(one_by_one(weights), "fp8 tensor")
    name = "mlp.experts.2.down_proj.weight_scale"
    load(tmp_path, {**stored, f"{name}_inv": stored[name].clone()}, "fp8 tensor")
    with pytest.raises(StartupError, match=rf"{name}_inv.* are the same weight"):
        load(tmp_path, {**stored, f"{name}_inv": stored[name] + 1}, "fp8 tensor")


@pytest.mark.parametrize("name", ["nvfp4"])
def test_experts_in_one_tensor_in_other_formats_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], name: str
) -> None:
    stored_dtype = torch.uint8 if name == "nvfp4" else torch.float8_e4m3fn
    tensors = {f"mlp.experts.{matrix}": weight.to(stored_dtype) for matrix, weight in weights.items()}
    with pytest.raises(StartupError, match=r"mlp\.experts\.down_proj .* instead of.*Weights are read as") as error:
        load(tmp_path, tensors, name)
    assert FORMATS[name].name in error.value.message


def test_scales_that_are_powers_of_two(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """They may be stored as such, in e8m0."""
    stored, _ = joined(weights, False)
    powers = {
        name: tensor.log2().round().exp2() if name.endswith("_scale_inv") else tensor for name, tensor in stored.items()
    }
    bytes_ = {
        name: tensor.to(torch.float8_e8m0fnu) if name.endswith("_scale_inv") else tensor
        for name, tensor in powers.items()
    }
    (tmp_path / "floats").mkdir()
    expected, found = load(tmp_path / "floats", powers, Fp8(BLOCKS)), load(tmp_path, bytes_, Fp8(BLOCKS))
    for name in weights:
        assert torch.equal(found.quantised[name][3], expected.quantised[name][3])


@table("form", ["fp8", "fp8 rows", "fp8 tensor"])
def test_powers_of_two_of_experts_one_by_one(tmp_path: Path, weights: dict[str, torch.Tensor], form: str) -> None:
    """Of blocks, rows and whole weights, also under two names."""
    stored, _ = quantised(one_by_one(weights), form)
    ends = ("weight_scale", "weight_scale_inv")
    powers = {name: tensor.log2().round().exp2() if name.endswith(ends) else tensor for name, tensor in stored.items()}
    bytes_ = {
        name: tensor.to(torch.float8_e8m0fnu) if name.endswith(ends) else tensor for name, tensor in powers.items()
    }
    name = next(name for name in bytes_ if name.endswith(ends))
    other = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
    (tmp_path / "floats").mkdir()
    expected = load(tmp_path / "floats", powers, form)
    found = load(tmp_path, {**bytes_, other: bytes_[name].clone()}, form)
    for matrix in weights:
        assert torch.equal(found.quantised[matrix][3], expected.quantised[matrix][3])
