"""What requests on SMG's scheduler wires have in common: sampling parameters, and what no such wire can express."""

from collections.abc import Collection, Iterable
from typing import Any

from saccade.protocol.request import SamplingParams

NO_LIMIT = -1


def sampling_fields(sampling: SamplingParams, eos_token_ids: Collection[int]) -> dict[str, Any]:
    """Return the fields of a wire's SamplingParams except the seed; *eos_token_ids* are the worker's own stops.

    Every field is sent, so that no default of the worker applies. The worker also reports the id that ended an answer.
    Our stop_token_ids hold the end-of-sequence ids unless these are to be ignored: then the worker must ignore them,
    too.
    """
    stops = frozenset(sampling.stop_token_ids)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or NO_LIMIT,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()},
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": not stops or (bool(eos_token_ids) and stops.isdisjoint(eos_token_ids)),
        "no_stop_trim": True,
        "n": 1,
        **({"structural_tag": sampling.grammar.text} if sampling.grammar is not None else {}),
    }


def int64_bytes(values: Iterable[int]) -> bytes:
    """Return *values* as the wires' int64 tensors hold them."""
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)
