"""Find the format of a checkpoint's quantised weights in its configuration, and the weights that may have it."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from saccade.engine.executor.weight_index import HF_QUANT_CONFIG
from saccade.errors import StartupError
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.nvfp4 import GROUP_SIZE, Nvfp4
from saccade.nn.formats.packed_ints import WORD, awq, compressed, gptq
from saccade.nn.formats.quantised import WHOLE_ROW, Cell, WeightFormat
from saccade.protocol.model_files import CONFIG

KEY = "quantization_config"
REGEX = "re:"
SCALE = "weight_scale"
"""The field of scales in most formats."""

NOT_CONVERTED = "modules_to_not_convert"


@dataclass(frozen=True)
class IgnoreList:
    """The modules that are not quantised: a name in *names*, or one that *expression* matches from its start.

    A name includes the modules within it, and may lack its first parts, for lists relative to the text model.
    """

    names: frozenset[str] = frozenset()
    expression: re.Pattern[str] | None = None

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "IgnoreList":
        """Read patterns: "re:" begins a regular expression, as in compressed-tensors; else * is a wildcard, as in
        Model Optimizer's lists. Raises re.error.
        """
        names, expressions = set(), []
        for pattern in patterns:
            if pattern.startswith(REGEX):
                expressions.append(re.compile(pattern.removeprefix(REGEX)).pattern)
            elif "*" in pattern:
                expressions.append(rf"(?:.*\.)?{re.escape(pattern).replace(re.escape('*'), '.*')}(?:\..*)?$")
            else:
                names.add(pattern)
        joined = "|".join(f"(?:{expression})" for expression in expressions)
        return cls(frozenset(names), re.compile(joined) if joined else None)

    def __contains__(self, module: str) -> bool:
        is_named = any(name in self.names for name in _names(module))
        return is_named or (self.expression is not None and self.expression.match(module) is not None)


def _names(module: str) -> Iterator[str]:
    """Yield the names of *module* and of its parents, as a list may write them."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        for first in range(end):
            yield ".".join(parts[first:end])


class Quantisation(NamedTuple):
    """The *format* of quantised weights, except in *ignored* modules, or the formats of *layers*, by name.

    *source* names the configuration, for errors.
    """

    format: WeightFormat | None
    ignored: IgnoreList
    source: str
    layers: Mapping[str, WeightFormat] = MappingProxyType({})

    def format_of(self, module: str) -> WeightFormat | None:
        """Return the format that *module* may have; None if it must be plain."""
        if module in self.ignored:
            return None
        name = next((name for name in _names(module) if name in self.layers), None) if self.layers else None
        return self.format if name is None else self.layers[name]

    @property
    def formats(self) -> str:
        """The names of all formats, for errors."""
        return ", ".join(dict.fromkeys(format.name for format in self._every))

    @property
    def is_fp8(self) -> bool:
        """Whether all formats are FP8."""
        return all(isinstance(format, Fp8) for format in self._every)

    @property
    def _every(self) -> list[WeightFormat]:
        return ([] if self.format is None else [self.format]) + list(self.layers.values())


def read_quantisation(config: Mapping[str, Any], folder: Path) -> Quantisation | None:
    """Return the quantisation of the checkpoint in *folder* with the parsed config.json *config*; None if it has none.

    Raises StartupError for an unknown format.
    """
    for source, section in _sections(config, folder):
        # hf_quant_config.json is Model Optimizer's own file, and does not name it.
        method = section.get("quant_method", "modelopt" if source == HF_QUANT_CONFIG else None)
        if not isinstance(method, str) or method not in METHODS:
            raise StartupError(f"{source}: the weight format {method!r} is not known. Known: {', '.join(METHODS)}.")
        return METHODS[method](section, source)
    return None


def _sections(config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sections that describe the format, with their names for errors, in order of preference."""
    text = config.get("text_config")
    if isinstance(config.get(KEY), dict):
        yield f"{CONFIG}: {KEY}", config[KEY]
    elif isinstance(text, dict) and isinstance(text.get(KEY), dict):
        yield f"{CONFIG}: text_config.{KEY}", text[KEY]
    path = folder / HF_QUANT_CONFIG
    if path.is_file():
        try:
            section = json.loads(path.read_bytes())["quantization"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StartupError(f"{path} has no readable `quantization`.") from error
        if not isinstance(section, dict):
            raise StartupError(f"{path}: `quantization` must hold an object.")
        yield HF_QUANT_CONFIG, section


def _compressed_tensors(section: Mapping[str, Any], source: str) -> Quantisation:
    kind = section.get("format")
    if not isinstance(kind, str) or kind not in COMPRESSED:
        raise _unknown(source, "format", kind, ", ".join(COMPRESSED))
    groups = section.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not weights or not all(isinstance(weight, dict) for weight in weights):
        raise StartupError(f"{source}: `config_groups` must describe `weights`.")
    allowed, read = COMPRESSED[kind]
    for weight in weights:
        for key, values in allowed.items():
            if weight.get(key) not in values:
                raise _unknown(source, f"weights.{key}", weight.get(key), ", ".join(map(repr, values)))
    return Quantisation(read(weights, source), _ignored(section, "ignore", source), source)


def _packed(weights: Sequence[Mapping[str, Any]], source: str) -> WeightFormat:
    kinds = {(weight["num_bits"], weight["strategy"], weight["symmetric"]) for weight in weights}
    sizes = [weight.get("group_size") for weight in weights]
    if len(kinds) > 1 or any(size != sizes[0] for size in sizes):
        raise StartupError(f"{source}: all of `config_groups` must have the same form of weights.")
    bits, strategy, symmetric = kinds.pop()
    size = WHOLE_ROW if strategy == "channel" else _group_size(sizes[0], bits, source)
    return compressed(bits, size, symmetric=symmetric)


def _group_size(size: object, bits: int, source: str) -> int:
    """Return the number of columns that share a scale; -1 is the whole row."""
    if size == -1:
        return WHOLE_ROW
    if type(size) is not int or size < 1 or size % (WORD // bits):
        raise StartupError(f"{source}: `group_size` must be one multiple of {WORD // bits}, not {size!r}.")
    return size


def _nvfp4(weights: Sequence[Mapping[str, Any]], source: str) -> WeightFormat:
    return Nvfp4("compressed-tensors nvfp4-pack-quantized", "weight_packed", "weight_global_scale", is_divisor=True)


def _float(weights: Sequence[Mapping[str, Any]], source: str) -> WeightFormat:
    cells = {_cell(weight, source) for weight in weights}
    if len(cells) > 1:
        raise StartupError(f"{source}: all of `config_groups` must have one `strategy` of weights.")
    return Fp8(cells.pop(), SCALE)


def _cell(weight: Mapping[str, Any], source: str) -> Cell | None:
    """Return the rows and columns of a weight that share a scale, by the `strategy` of compressed-tensors."""
    match weight.get("strategy"), weight.get("block_structure"):
        case "tensor", _:
            return None
        case "channel", _:
            return 1, WHOLE_ROW
        case "block", [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
        case "block", value:
            raise _unknown(source, "weights.block_structure", value, "[128, 128]")
        case value, _:
            raise _unknown(source, "weights.strategy", value, "tensor, channel, block")


Check = tuple[Mapping[str, tuple[object, ...]], Callable[[Sequence[Mapping[str, Any]], str], WeightFormat]]
COMPRESSED: Mapping[str, Check] = MappingProxyType(
    {
        "pack-quantized": (
            {
                "num_bits": (4, 8),
                "type": ("int",),
                "symmetric": (True, False),
                "strategy": ("group", "channel"),
                # By weight, the order was that of the calibration only: the checkpoint is as without.
                "actorder": (None, "weight", "static"),
            },
            _packed,
        ),
        "float-quantized": ({"symmetric": (True,), "num_bits": (8,), "type": ("float",)}, _float),
        "nvfp4-pack-quantized": (
            {"num_bits": (4,), "type": ("float",), "symmetric": (True,), "group_size": (GROUP_SIZE,)},
            _nvfp4,
        ),
    }
)
"""The allowed values of each `format` of compressed-tensors, and a reader of the others."""


def _fp8(section: Mapping[str, Any], source: str) -> Quantisation:
    _check(section, source, {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static"), "scale_fmt": ("float",)})
    ignored = _ignored(section, NOT_CONVERTED, source)
    match section.get("weight_block_size"):
        case None:
            return Quantisation(Fp8(None, SCALE), ignored, source)
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return Quantisation(Fp8((rows, columns)), ignored, source)
        case block_size:
            raise _unknown(source, "weight_block_size", block_size, "[128, 128]")


def _awq(section: Mapping[str, Any], source: str) -> Quantisation:
    _check(section, source, {"bits": (4,), "zero_point": (True,), "version": ("gemm",)})
    size = _group_size(section.get("group_size"), 4, source)
    return Quantisation(awq(size), _ignored(section, NOT_CONVERTED, source), source)


GPTQ_OFFSETS: Mapping[str, int] = MappingProxyType({"gptq": 1, "gptq_v2": 0})
"""The number that is added to a stored zero point, by `checkpoint_format`."""


def _gptq(section: Mapping[str, Any], source: str) -> Quantisation:
    _check(section, source, {"desc_act": (False,), "checkpoint_format": tuple(GPTQ_OFFSETS), "dynamic": ({},)})
    bits, offset = section.get("bits"), GPTQ_OFFSETS[section.get("checkpoint_format") or "gptq"]
    if bits not in (4, 8):
        raise _unknown(source, "bits", bits, "4, 8")
    size = _group_size(section.get("group_size"), bits, source)
    return Quantisation(gptq(bits, size, zeros_offset=offset), _ignored(section, NOT_CONVERTED, source), source)


def _check(section: Mapping[str, Any], source: str, allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise StartupError if *section* has a key with a value that is not *allowed*; null counts as absent."""
    for key, values in allowed.items():
        if section.get(key) is not None and section[key] not in values:
            raise _unknown(source, key, section[key], ", ".join(map(str, values)))


def _modelopt(section: Mapping[str, Any], source: str) -> Quantisation:
    key = "exclude_modules" if "exclude_modules" in section else "ignore"
    ignored = _ignored(section, key, source)
    if section.get("quant_algo") != MIXED:
        return Quantisation(_algorithm(section, source, (*ALGORITHMS, MIXED)), ignored, source)
    layers = section.get("quantized_layers")
    if not isinstance(layers, dict) or not layers or not all(isinstance(layer, dict) for layer in layers.values()):
        raise StartupError(f"{source}: `quantized_layers` must describe the layers of {MIXED}.")
    formats = {name: _algorithm(layer, f"{source}: {name}", ALGORITHMS) for name, layer in layers.items()}
    return Quantisation(None, ignored, source, MappingProxyType(formats))


def _algorithm(section: Mapping[str, Any], source: str, supported: Iterable[str]) -> WeightFormat:
    """Return the format of Model Optimizer's `quant_algo`; *supported* are the names for an error."""
    algorithm = section.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise _unknown(source, "quant_algo", algorithm, ", ".join(supported))
    format = ALGORITHMS[algorithm]
    if isinstance(format, Nvfp4) and section.get("group_size", GROUP_SIZE) != GROUP_SIZE:
        raise _unknown(source, "group_size", section["group_size"], str(GROUP_SIZE))
    return format


MIXED = "MIXED_PRECISION"
ALGORITHMS: Mapping[str, WeightFormat] = MappingProxyType(
    {"NVFP4": Nvfp4(), "W4A16_NVFP4": Nvfp4(), "FP8": Fp8(None, SCALE)}
)
"""Formats of Model Optimizer, by `quant_algo`: how it rounds activations does not matter here."""

METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Quantisation]] = MappingProxyType(
    {"awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq, "modelopt": _modelopt}
)
"""Readers of the formats' sections, by `quant_method`."""


def _unknown(source: str, key: str, value: object, supported: str) -> StartupError:
    return StartupError(f"{source}: {key} {value!r} is not served; known: {supported}.")


def _ignored(section: Mapping[str, Any], key: str, source: str) -> IgnoreList:
    patterns = section.get(key) or []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise StartupError(f"{source}: `{key}` must be a list of names.")
    try:
        return IgnoreList.of(patterns)
    except re.error as error:
        raise StartupError(f"{source}: `{key}` has {error.pattern!r}, which is not a regular expression.") from error
