"""Describe rounded weights in config.json, in the words of compressed-tensors.

Source: compressed-tensors 0.20, quantization/quant_config.py and quantization/quant_args.py.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from saccade.engine.executor.quantisation import REGEX
from saccade.engine.executor.rounding import GROUP_SIZE, HEAD, INT4, INT8

LINEAR = "Linear"
"""The class of modules that have the format of a group, unless another group names them."""

OF_EXPERTS = r".*\.experts\..*"
"""Experts, which stay plain: one by one, or all of a layer in one tensor."""

TIED = "tie_word_embeddings"

GROUPS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        INT8: {
            "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            # Each token gets a scale when it is multiplied.
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        },
        INT4: {
            "format": "pack-quantized",
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE,
                "dynamic": False,
            },
            "input_activations": None,
        },
    }
)  # fmt: skip
"""The settings of each format, as a group of modules has them."""


def quantization_config(formats: Mapping[str, str], plain: Iterable[str]) -> dict[str, Any]:
    """Return the section for a checkpoint whose modules have *formats*, and whose *plain* modules have plain matrices.

    A group has the modules of a class or of names. So the group with int4 has the class, if there is one.
    """
    used = [format for format in (INT4, INT8) if format in formats.values()]
    groups = {
        f"group_{index}": {"targets": _targets(formats, format, of_class=index == 0), **GROUPS[format]}
        for index, format in enumerate(used)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": GROUPS[used[0]]["format"] if len(used) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*(name for name in plain if ".experts." not in name), REGEX + OF_EXPERTS],
    }


def _targets(formats: Mapping[str, str], format: str, *, of_class: bool) -> list[str]:
    own = [name for name in formats if formats[name] == format]
    # vLLM's class of a head is another, and the head's name there may have a prefix.
    heads = [f"{REGEX}.*{HEAD}$"] if any(name.endswith(HEAD) for name in own) else []
    return [*([LINEAR] if of_class else (name for name in own if not name.endswith(HEAD))), *heads]


def with_own_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return *config* for a checkpoint that stores a head besides the embedding."""
    nested = {
        key: {**value, TIED: False}
        for key, value in config.items()
        if isinstance(value, dict) and (key == "text_config" or TIED in value)
    }
    return {**config, **nested, TIED: False}
