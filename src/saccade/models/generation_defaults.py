"""Sampling parameters of requests that set none, from generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import StartupError
from saccade.protocol.model_files import GENERATION_CONFIG


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters of requests that set none; *eos_token_ids* end every answer."""

    temperature: float
    top_p: float
    top_k: int
    eos_token_ids: tuple[int, ...]


def generation_defaults(generation: Mapping[str, Any], config: Mapping[str, Any]) -> GenerationDefaults:
    """Return the defaults in generation_config.json; end-of-sequence ids else from config.json. Raises StartupError."""
    text_config = config.get("text_config") or {}
    eos: int | list[int] = next(
        (c["eos_token_id"] for c in (generation, config, text_config) if c.get("eos_token_id") is not None), []
    )
    eos_token_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    temperature = generation.get("temperature", 1.0) if generation.get("do_sample", True) else 0.0
    defaults = GenerationDefaults(
        temperature=temperature,
        top_p=generation.get("top_p", 1.0),
        top_k=generation.get("top_k", 0),
        eos_token_ids=eos_token_ids,
    )
    numbers = (defaults.temperature, defaults.top_p, defaults.top_k, *eos_token_ids)
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        raise StartupError(f"{GENERATION_CONFIG}: temperature, top_p, top_k and eos_token_id must be numbers.")
    return defaults
