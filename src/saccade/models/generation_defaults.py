"""Reads default sampling parameters from generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from saccade.errors import StartupError
from saccade.models import files
from saccade.models.end_tokens import end_token_ids
from saccade.models.family import Family
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import GENERATION_CONFIG

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 1e6),
    "top_p": (0.001, 1),
    "top_k": (-1, 1e9),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 1e9),
}
"""The least and the largest value of each parameter; vLLM reads the same ones."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters for requests that set none. Any of *eos_token_ids* ends an answer.

    Without *max_new_tokens*, an answer may be as long as the context.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def max_tokens(self, room: int) -> int:
        """Return the token limit for an answer whose request sets none; the context has *room* tokens left."""
        return room if self.max_new_tokens is None else min(room, self.max_new_tokens)


def generation_defaults(model_files: ModelFiles, family: Family) -> GenerationDefaults:
    """Return the defaults in generation_config.json, and the ids that end an answer. Raises StartupError.

    With `do_sample: false` the temperature is 0.
    """
    generation = files.parse_json(model_files, GENERATION_CONFIG)
    values = {key: _parameter(key, generation[key]) for key in BOUNDS if generation.get(key) is not None}
    if not generation.get("do_sample", True):
        values["temperature"] = 0.0
    values["top_k"] = max(values.get("top_k", 0), 0)
    return GenerationDefaults(**values, eos_token_ids=end_token_ids(model_files, family))


def _parameter(key: str, value: Any) -> Any:
    least, most = BOUNDS[key]
    kinds = (int,) if key in ("top_k", "max_new_tokens") else (int, float)
    if type(value) in kinds and least <= value <= most:
        return value
    kind = "a whole number" if len(kinds) == 1 else "a number"
    raise StartupError(f"{GENERATION_CONFIG}: {key} must be {kind} from {least:g} to {most:g}, not {value!r}.")
