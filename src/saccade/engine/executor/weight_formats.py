"""Find the format of a checkpoint's quantised weights in its configuration, and the weights that may have it."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from saccade.engine.executor.quantisation import REGEX, ModuleList, Quantisation, Rule
from saccade.engine.executor.weight_index import HF_QUANT_CONFIG
from saccade.errors import StartupError
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.int8 import Int8
from saccade.nn.formats.nvfp4 import GROUP_SIZE, Nvfp4
from saccade.nn.formats.packed_ints import WORD, awq, compressed, gptq
from saccade.nn.formats.quantised import WHOLE_ROW, Cell, WeightFormat
from saccade.protocol.model_files import CONFIG

KEY = "quantization_config"
SCALE = "weight_scale"
"""The field of scales in most formats."""

EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""The keys that list plain modules, of all formats: tools write each of them with each method."""


NAME, EXPRESSION, CLASS = range(3)
BY_ACTIVATIONS = ("group", "dynamic")
"""Values of `actorder` with which groups may have other columns than successive ones."""

Check = tuple[Mapping[str, tuple[object, ...]], Callable[[Mapping[str, Any], str], WeightFormat]]
GPTQ_OFFSETS: Mapping[str, int] = MappingProxyType({"gptq": 1, "gptq_v2": 0})
"""The number that is added to a stored zero point, by `checkpoint_format`."""

WITHOUT, WITH = "-:", "+:"
"""The beginnings of patterns in GPTQ's `dynamic`: modules that are not quantised, and modules with other settings."""

PLAIN_BITS = 16
"""AutoRound's mark of modules that stay plain."""

MIXED = "MIXED_PRECISION"
ALGORITHMS: Mapping[str, WeightFormat] = MappingProxyType(
    {"NVFP4": Nvfp4(), "W4A16_NVFP4": Nvfp4(), "FP8": Fp8(None, SCALE)}
)
"""Formats of Model Optimizer, by `quant_algo`: how it rounds activations does not matter here."""


def read_quantisation(config: Mapping[str, Any], folder: Path) -> Quantisation | None:
    """Return the quantisation of the checkpoint in *folder* with the parsed config.json *config*; None if it has none.

    Raises StartupError for an unknown format.
    """
    for source, section in _sections(config, folder):
        # Model Optimizer does not name itself in hf_quant_config.json, nor do some of its releases in config.json.
        is_modelopt = source == HF_QUANT_CONFIG or "quant_algo" in section
        method = section.get("quant_method", "modelopt" if is_modelopt else None)
        if not isinstance(method, str) or method not in METHODS:
            raise StartupError(f"{source}: the weight format {method!r} is not known. Known: {', '.join(METHODS)}.")
        return METHODS[method](section, source)
    return None


def _sections(config: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the sections that describe the format, with their names for error messages, in order of preference."""
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
    groups = section.get("config_groups")
    every = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    # A group without weights describes activations alone.
    every = [group for group in every if group.get("weights") is not None]
    if not every or not all(isinstance(group["weights"], dict) for group in every):
        raise StartupError(f"{source}: `config_groups` must describe `weights`.")
    rules = [rule for group in every for rule in _rules_of(group, section.get("format"), source)]
    formats = list(dict.fromkeys(rule.format for rule in rules))
    ignored = _ignored(section, source)
    if len(formats) == 1:
        return Quantisation(formats[0], ignored, source)
    # As in compressed-tensors, a name comes before an expression, and that before a class of modules.
    names, expressions, classes = (
        [rule for rule in rules if _rank(rule.modules) == rank] for rank in (NAME, EXPRESSION, CLASS)
    )
    if len(dict.fromkeys(rule.format for rule in classes)) > 1:
        raise StartupError(f"{source}: several of `config_groups` have the same class of modules as their target.")
    return Quantisation(classes[0].format if classes else None, ignored, source, rules=(*names, *expressions))


def _rules_of(group: Mapping[str, Any], otherwise: object, source: str) -> Iterator[Rule]:
    """Yield a group's rules, one for each of its targets. The rule for a class of modules names no modules.

    *otherwise* is the format of groups that name none.
    """
    kind, weights = group.get("format") or otherwise, group["weights"]
    if not isinstance(kind, str) or kind not in COMPRESSED:
        raise _unknown(source, "format", kind, ", ".join(COMPRESSED))
    allowed, read = COMPRESSED[kind]
    for key, values in allowed.items():
        if weights.get(key) not in values:
            raise _unknown(source, f"weights.{key}", weights.get(key), ", ".join(map(repr, values)))
    format = read(weights, source)
    for target in _texts(group, "targets", source) or [""]:
        is_class = not target or target[0].isupper()
        yield Rule(ModuleList() if is_class else _modules([target], "targets", source), format)


def _rank(modules: ModuleList) -> int:
    return NAME if modules.names else CLASS if modules.expression is None else EXPRESSION


def _packed(weights: Mapping[str, Any], source: str) -> WeightFormat:
    bits, symmetric = weights["num_bits"], weights["symmetric"]
    is_channel = weights["strategy"] == "channel"
    size = WHOLE_ROW if is_channel else _group_size(weights.get("group_size"), bits, source)
    by_activations = weights.get("actorder") in BY_ACTIVATIONS
    return compressed(bits, size, symmetric=symmetric, by_activations=by_activations)


def _group_size(size: object, bits: int, source: str) -> int:
    """Return the number of columns that share a scale; a *size* of -1 stands for the whole row."""
    if size == -1:
        return WHOLE_ROW
    if type(size) is not int or size < 1 or size % (WORD // bits):
        raise StartupError(f"{source}: `group_size` must be one multiple of {WORD // bits}, not {size!r}.")
    return size


def _nvfp4(weights: Mapping[str, Any], source: str) -> WeightFormat:
    return Nvfp4("compressed-tensors nvfp4-pack-quantized", "weight_packed", "weight_global_scale", is_divisor=True)


def _float(weights: Mapping[str, Any], source: str) -> WeightFormat:
    return Fp8(_cell(weights, source), SCALE)


def _int8(weights: Mapping[str, Any], source: str) -> WeightFormat:
    return Int8(_cell(weights, source))


def _cell(weight: Mapping[str, Any], source: str) -> Cell | None:
    """Return how many rows and columns of a weight share a scale, by the `strategy` of compressed-tensors."""
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


COMPRESSED: Mapping[str, Check] = MappingProxyType(
    {
        "pack-quantized": (
            {
                "num_bits": (4, 8),
                "type": ("int",),
                "symmetric": (True, False),
                "strategy": ("group", "channel"),
                # By weight, the order was that of the calibration only: the checkpoint is as without.
                "actorder": (None, "weight", "static", *BY_ACTIVATIONS),
            },
            _packed,
        ),
        "int-quantized": (
            {"num_bits": (8,), "type": ("int",), "symmetric": (True,), "strategy": ("channel", "tensor")},
            _int8,
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
    _check(
        section, source, {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static"), "scale_fmt": ("float", "ue8m0")}
    )
    ignored = _ignored(section, source)
    match section.get("weight_block_size"):
        case None:
            return Quantisation(Fp8(None, SCALE), ignored, source)
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return Quantisation(Fp8((rows, columns)), ignored, source)
        case block_size:
            raise _unknown(source, "weight_block_size", block_size, "[128, 128]")


def _awq(section: Mapping[str, Any], source: str) -> Quantisation:
    # AutoAWQ's own file has the older names, and the version in capitals.
    bits, size = section.get("bits") or section.get("w_bit"), section.get("group_size") or section.get("q_group_size")
    stated = {**section, "bits": bits, "version": str(section.get("version") or "gemm").lower()}
    _check(stated, source, {"bits": (4,), "zero_point": (True,), "version": ("gemm",)})
    return Quantisation(awq(_group_size(size, 4, source)), _ignored(section, source), source)


def _gptq(section: Mapping[str, Any], source: str) -> Quantisation:
    dynamic, only = section.get("dynamic") or {}, _in_blocks(section, source)
    if not isinstance(dynamic, dict):
        raise StartupError(f"{source}: `dynamic` must map patterns of modules to settings, not {dynamic!r}.")
    rules = tuple(_dynamic_rule(section, pattern, settings, source) for pattern, settings in dynamic.items())
    head = ("lm_head",) if only and section.get("lm_head") else ()
    format, ignored = _gptq_format(section, source), _ignored(section, source)
    origin = f"{source} and its `dynamic`" if dynamic else source
    return Quantisation(format, ignored, origin, rules=rules, only=(*only, *head))


def _gptq_format(section: Mapping[str, Any], source: str) -> WeightFormat:
    _check(
        section,
        source,
        {"desc_act": (False, True), "checkpoint_format": tuple(GPTQ_OFFSETS), "pack_dtype": ("int32",)},
    )
    bits, offset = section.get("bits"), GPTQ_OFFSETS[section.get("checkpoint_format") or "gptq"]
    if bits not in (4, 8):
        raise _unknown(source, "bits", bits, "4, 8")
    size = _group_size(section.get("group_size"), bits, source)
    # With `static_groups`, too, the groups are successive columns; the tensors tell.
    return gptq(bits, size, zeros_offset=offset, by_activations=bool(section.get("desc_act")))


def _dynamic_rule(section: Mapping[str, Any], pattern: str, settings: object, source: str) -> Rule:
    """Return the rule for an entry of `dynamic`, whose settings replace those of *section* for its modules."""
    place = f"{source}: dynamic {pattern!r}"
    if settings not in ({}, None, False) and not isinstance(settings, dict):
        raise StartupError(f"{place} must have settings, false or null, not {settings!r}.")
    modules = _modules([REGEX + pattern.removeprefix(WITHOUT).removeprefix(WITH)], "dynamic", source)
    if pattern.startswith(WITHOUT) or settings is False:
        return Rule(modules, None)
    own = settings if isinstance(settings, dict) else {}
    methods = own.get("quant_method", own.get("method"))
    if methods not in (None, *METHODS) or (methods is not None and METHODS[methods] is not _gptq):
        raise _unknown(place, "quant_method", methods, "gptq")
    return Rule(modules, _gptq_format({**section, **own}, place))


def _auto_round(section: Mapping[str, Any], source: str) -> Quantisation:
    """Read a section of AutoRound, which packs weights like GPTQ or AWQ. Modules may have settings of their own."""
    packing = section.get("packing_format")
    read = next((PACKINGS[end] for end in PACKINGS if str(packing).removeprefix("auto_round:") == end), None)
    if read is None:
        raise _unknown(source, "packing_format", packing, ", ".join(f"auto_round:{end}" for end in PACKINGS))
    _check(section, source, {"data_type": ("int",)})
    whole = read({**section, "zero_point": None}, source)
    others = section.get("extra_config") or {}
    if not isinstance(others, dict) or not all(isinstance(own, dict) for own in others.values()):
        raise StartupError(f"{source}: `extra_config` must describe modules, not {others!r}.")
    rules = (
        Rule(
            _modules([name], "extra_config", source),
            None
            if type(bits := own.get("bits")) is int and bits >= PLAIN_BITS
            else read({**section, **own, "zero_point": None}, f"{source}: extra_config {name!r}").format,
        )
        for name, own in others.items()
    )
    return whole._replace(rules=tuple(rules))


PACKINGS: Mapping[str, Callable[[Mapping[str, Any], str], Quantisation]] = MappingProxyType(
    {"auto_gptq": _gptq, "gptq": _gptq, "auto_awq": _awq, "awq": _awq}
)


def _in_blocks(section: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Return the modules in a block that GPTQ quantises. *section* names them in one list, or in several in order."""
    key = "modules_in_block_to_quantize"
    lists = section.get(key) or []
    flat = (
        [name for one in lists for name in (one if isinstance(one, list) else [one])]
        if isinstance(lists, list)
        else None
    )
    if flat is None or not all(isinstance(name, str) for name in flat):
        raise StartupError(f"{source}: `{key}` must list names of modules.")
    return tuple(flat)


def _check(section: Mapping[str, Any], source: str, allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise StartupError if *section* has a key with a value that is not *allowed*; null counts as absent."""
    for key, values in allowed.items():
        if section.get(key) is not None and section[key] not in values:
            raise _unknown(source, key, section[key], ", ".join(map(str, values)))


def _modelopt(section: Mapping[str, Any], source: str) -> Quantisation:
    ignored = _ignored(section, source)
    if section.get("quant_algo") != MIXED:
        return Quantisation(_algorithm(section, source, (*ALGORITHMS, MIXED)), ignored, source)
    layers = section.get("quantized_layers")
    if not isinstance(layers, dict) or not layers or not all(isinstance(layer, dict) for layer in layers.values()):
        raise StartupError(f"{source}: `quantized_layers` must describe the layers of {MIXED}.")
    formats = {name: _algorithm(layer, f"{source}: {name}", ALGORITHMS) for name, layer in layers.items()}
    return Quantisation(None, ignored, source, MappingProxyType(formats))


def _algorithm(section: Mapping[str, Any], source: str, supported: Iterable[str]) -> WeightFormat:
    """Return the format of Model Optimizer's `quant_algo`; *supported* are the names that an error lists."""
    algorithm = section.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise _unknown(source, "quant_algo", algorithm, ", ".join(supported))
    format = ALGORITHMS[algorithm]
    if isinstance(format, Nvfp4) and section.get("group_size", GROUP_SIZE) != GROUP_SIZE:
        raise _unknown(source, "group_size", section["group_size"], str(GROUP_SIZE))
    return format


METHODS: Mapping[str, Callable[[Mapping[str, Any], str], Quantisation]] = MappingProxyType(
    {
        "auto-round": _auto_round,
        "awq": _awq,
        "awq_marlin": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "gptq_marlin": _gptq,
        "modelopt": _modelopt,
    }
)
"""Readers of the formats' sections, by `quant_method`."""


def _unknown(source: str, key: str, value: object, supported: str) -> StartupError:
    return StartupError(f"{source}: {key} {value!r} is not served; known: {supported}.")


def _ignored(section: Mapping[str, Any], source: str) -> ModuleList:
    """Return the modules that *section* leaves plain."""
    lists = {key: _texts(section, key, source) for key in EXCLUSIONS}
    for key, names in lists.items():
        _modules(names, key, source)
    return ModuleList.of(name for names in lists.values() for name in names)


def _modules(names: Iterable[str], key: str, source: str) -> ModuleList:
    try:
        return ModuleList.of(names)
    except re.error as error:
        raise StartupError(f"{source}: `{key}` has {error.pattern!r}, which is not a regular expression.") from error


def _texts(section: Mapping[str, Any], key: str, source: str) -> list[str]:
    names = section.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise StartupError(f"{source}: `{key}` must be a list of names.")
    return names
