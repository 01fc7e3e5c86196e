"""Parses the value of --speculative-config."""

import json
from dataclasses import dataclass
from typing import Literal, Self

from saccade.errors import StartupError

RUN_LENGTH = 3
"""How many tokens prompt lookup looks for by default."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """The source of proposals: prompt lookup (ngram) or the model's draft layer (mtp), at most *num_tokens* a step.

    Prompt lookup looks for the last *longest* tokens, then for fewer, down to *shortest*.
    """

    method: Literal["ngram", "mtp"]
    num_tokens: int
    shortest: int = RUN_LENGTH
    longest: int = RUN_LENGTH

    @classmethod
    def read_option(cls, text: str) -> Self:
        """Parse a JSON object in vLLM's form; `mtp` may follow a family's name. Raises StartupError."""
        values = json.loads(text)
        if "model" in values:
            raise StartupError(
                "--speculative-config: a draft `model` is not served; leave it out, and use the method ngram, or mtp "
                "for a release with a draft layer of its own."
            )
        method = values.pop("method", "ngram")
        if str(method).rpartition("_")[2] == "mtp":
            num_tokens = values.pop("num_speculative_tokens", 1)
            if values or type(num_tokens) is not int or num_tokens < 1:
                raise StartupError(
                    f"--speculative-config: the method {method} takes num_speculative_tokens alone, a whole number of "
                    "at least 1."
                )
            return cls("mtp", num_tokens)
        if method != "ngram":
            raise StartupError(f"--speculative-config: method {method!r} is not known; the methods are ngram and mtp.")
        numbers = {
            name: values.pop(name, None)
            for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        }
        if values:
            raise StartupError(
                f"--speculative-config does not take {', '.join(values)}; it takes method, {', '.join(numbers)}."
            )
        num_tokens, longest, shortest = numbers.values()
        longest = longest or shortest or RUN_LENGTH
        shortest = shortest or longest
        if not all(type(number) is int and number > 0 for number in (num_tokens, longest, shortest)):
            raise StartupError(f"--speculative-config: {', '.join(numbers)} are whole numbers of at least 1.")
        if shortest > longest:
            raise StartupError("--speculative-config: prompt_lookup_min must not be over prompt_lookup_max.")
        return cls("ngram", num_tokens, shortest, longest)
