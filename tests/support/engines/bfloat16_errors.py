"""What bfloat16 does to logits: of the engine and of the reference, each against the reference in float64.

Errors are in units of the standard deviation of a row of exact logits. The reference in float64 has weights and
activations in float64; its code computes norms, rotary angles and routers in float32 whatever the weights are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engines
import torch
from references.networks import ORACLES

PROMPTS: tuple[list[Any], ...] = ([37], [5, ((192, 128), 1), 9], [3, ((96, 160), 2), 6, ((320, 64), 3), 8])


class Error(NamedTuple):
    """The mean and the largest difference over all logits of all rows."""

    mean: float
    largest: float


class Errors(NamedTuple):
    """Errors of the engine and of the reference in bfloat16, and of the reference in float32."""

    engine: Error
    reference: Error
    reference_float32: Error


def oracle_in(release: str, folder: Path, dtype: torch.dtype) -> Any:
    """Return the oracle of a release with all weights in *dtype*."""
    oracle: Any = ORACLES[release](folder)
    for parameter in oracle.model.parameters():
        parameter.data = parameter.data.to(dtype)
    if hasattr(oracle.model, "set_experts_implementation"):
        # The default, a grouped product, takes neither float64 nor every width of bfloat16.
        oracle.model.set_experts_implementation("eager")
    return oracle


def errors(release: str, folder: Path, prompts: Sequence[list[Any]] = PROMPTS, max_tokens: int = 12) -> Errors:
    """Return the errors of all logits from which the engine in bfloat16 chose its answers to *prompts*.

    The reference gets the engine's tokens, so that both sides compute the same rows.
    """
    subject = engines.engine(folder, dtype="bfloat16", max_num_batched_tokens=2048)
    found = engines.record_logits(subject)
    asked = [
        engines.request(folder, parts, str(number), number, max_tokens=max_tokens)
        for number, parts in enumerate(prompts)
    ]
    answers = engines.drain(subject, *asked).answers

    def reference(dtype: torch.dtype) -> torch.Tensor:
        oracle = oracle_in(release, folder, dtype)
        return torch.cat([oracle.logits(one, answers[one.request_id].token_ids) for one in asked])

    ours = torch.cat([torch.stack(found[one.request_id]) for one in asked])
    exact = reference(torch.float64)  # which the oracle rounds to float32, once
    return Errors(*(_error(rows, exact) for rows in (ours, reference(torch.bfloat16), reference(torch.float32))))


def _error(rows: torch.Tensor, exact: torch.Tensor) -> Error:
    differences = (rows.float() - exact).abs() / exact.std(1, keepdim=True)
    return Error(differences.mean().item(), differences.max().item())
