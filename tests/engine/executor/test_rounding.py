"""--quantization int8 and int4: which layers are rounded, how far, and by which kernel they are multiplied."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import engines
import pytest
import torch

from saccade.cli.bundled import bundled
from saccade.engine.config import EngineConfig
from saccade.engine.executor import loader, rounding
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.nn import layers
from saccade.nn.formats.cpu_int4 import CpuInt4
from saccade.nn.formats.int8 import Int8
from saccade.nn.formats.onednn_int8 import Int8Product
from saccade.nn.formats.packed_ints import PackedInts
from saccade.nn.formats.quantised import QuantisedLinear, QuantisedWeight
from saccade.nn.layers import Linear

TEXT = "language_model.layers."


def load(folder: Path, choice: str | None) -> torch.nn.Module:
    config = EngineConfig(str(folder), "tiny", device="cpu", quantization=choice)  # type: ignore[arg-type]
    return load_model(config, lambda *_: None).module


def formats(network: torch.nn.Module) -> dict[str, object]:
    """The class of the format of each rounded layer."""
    found = {}
    for name, layer in network.named_modules():
        if isinstance(layer, Linear) and isinstance(layer.packed, QuantisedLinear):
            (part,) = layer.packed.parts
            assert isinstance(part, QuantisedWeight)
            found[name] = type(part.format)
    return found


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "gemma4"])
@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_text_vision_and_head_are_rounded(
    choice: str, name: str, network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers are not, nor experts, which have no kernel."""
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 16)
    folder = network_folder(name)
    plain, rounded = load(folder, None), load(folder, choice)
    found = formats(rounded)
    assert "lm_head" in found
    assert any(not place.startswith((TEXT, "lm_head")) for place in found)
    assert not any(place.endswith((".gate", "router.proj")) for place in found)
    for place, kind in found.items():
        exact = plain.get_submodule(place).dequantised()  # type: ignore[operator]
        columns = exact.shape[1]
        is_int4 = choice == "int4" and place.startswith(TEXT) and columns % 64 == 0
        assert kind is (PackedInts if is_int4 else Int8), place
        group = 64 if is_int4 else columns
        largest = exact.unflatten(1, (-1, group)).abs().amax(-1).repeat_interleave(group, 1)
        difference = (rounded.get_submodule(place).dequantised() - exact).abs()  # type: ignore[operator]
        # Half of a step, or a little more if the scale is rounded to bfloat16.
        assert (difference <= largest * (0.55 / 7 if is_int4 else 0.51 / 127)).all(), place


@pytest.mark.ci
@pytest.mark.parametrize(("choice", "kernel"), [("int8", Int8Product), ("int4", CpuInt4)])
def test_layers_by_kernel(choice: str, kernel: type) -> None:
    """Of the bundled model, no layer is dequantised at each use; the kernel that reads patches stays plain."""
    subject = engines.engine(bundled("model"), quantization=choice)
    found: dict[bool, Counter[type]] = {True: Counter(), False: Counter()}
    for name, layer in engines.module(subject).named_modules():
        if isinstance(layer, Linear) and ".patch_embed." not in name:
            found[name.startswith(TEXT)][type(layer.packed)] += 1
    assert set(found[True]) == {kernel}
    assert set(found[False]) == {Int8Product}


def test_what_the_description_says(network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of the weights, or how many bytes int8 would save: three of four, in float32."""
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 16)
    folder = network_folder("qwen3_vl")
    plain = engines.engine(folder).description
    network = load(folder, None)
    linear = sum(network.get_submodule(name).weight.numel() for name in formats(load(folder, "int8")))  # type: ignore[operator,union-attr]
    assert (plain.weight_formats, plain.rounding_saves) == ("", 3 * linear)
    rounded = engines.engine(folder, quantization="int8").description
    assert (rounded.weight_formats, rounded.rounding_saves) == ("rounded by --quantization int8", 0)


@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_only_a_cpu_has_the_kernels(choice: str, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "choose_device", lambda *_: torch.device("cuda"))
    with pytest.raises(StartupError, match=f"--quantization {choice} has kernels for CPUs alone"):
        load(tiny_qwen3_vl, choice)


@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_one_layer_is_plain_at_a_time(
    choice: str, network_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So rounding while loading takes no more memory than the rounded weights and one plain one."""
    monkeypatch.setattr(layers, "LEAST_ROUNDED", 16)
    numbers = []

    def watched(network: torch.nn.Module, chosen: str | None) -> Callable[[str], None]:
        round_layer, names = rounding.rounding(network, chosen), rounding.formats_of_layers(network, choice)

        def watch(name: str) -> None:
            subjects = [network.get_submodule(one) for one in names if one != rounding.HEAD]
            numbers.append(sum(not one.weight.is_meta and one.weight.numel() > 0 for one in subjects))  # type: ignore[union-attr,operator]
            round_layer(name)

        return watch

    monkeypatch.setattr(loader, "rounding", watched)
    load(network_folder("qwen3_vl"), choice)
    assert max(numbers) == 1
