"""Estimates from past steps how long prompts and images take, and how much of them fits next to decodes.

The estimate is that a step lasts as long as its decodes, plus a fixed time per prompt token, and per patch in each
encoder layer. The latest measurement counts as much as all before it. So an estimate falls by half at most, and a step
that was fast by chance does not make the next one long.

Does not import torch.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple


class StepWork(NamedTuple):
    """A step's work: whether sequences decode, how many prompt tokens it computes, and how many layers of patches.

    If it *projects*, these layers are projectors, which may take shorter or longer than the encoder's layers.
    """

    decodes: bool
    tokens: int
    patch_layers: int
    projects: bool = False

    @property
    def only_decodes(self) -> bool:
        """Whether sequences decode, and the step has nothing else to do."""
        return self.decodes and not (self.tokens or self.patch_layers)


NO_WORK = StepWork(False, 0, 0)


class Allowance(NamedTuple):
    """The most work that fits next to decodes: *tokens* of prompts, or *patch_layers* of images, or a mix of both.

    Images leave prompts at least *least_tokens*.
    """

    tokens: int
    patch_layers: int
    least_tokens: int

    def tokens_with(self, patch_layers: int) -> int:
        """Return the tokens that fit with *patch_layers*."""
        return max(self.least_tokens, self.tokens - -(-self.tokens * patch_layers // self.patch_layers))

    def patch_layers_with(self, tokens: int) -> int:
        """Return the layers of patches that fit with *tokens*."""
        return max(0, self.patch_layers - -(-self.patch_layers * tokens // self.tokens))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The seconds that a step with decodes alone takes, and that a token or a patch in one layer adds; 0 if unknown."""

    decodes: float = 0.0
    token: float = 0.0
    patch_layer: float = 0.0

    def after(self, work: StepWork, seconds: float, encode_seconds: float) -> "StepCosts":
        """Return the costs, updated after a step of *seconds*, of which the host spent *encode_seconds* on images."""
        if not (work.tokens or work.patch_layers):
            return replace(self, decodes=_mean(self.decodes, seconds)) if work.decodes else self
        # A short chunk shares the decodes' reads of the weights, and may seem to take no time at all.
        added = max(0.0, seconds - self.decodes) if work.decodes else seconds
        # Fewer sequences may decode than in the last step that had nothing else to do.
        costs = replace(self, decodes=min(self.decodes, seconds)) if work.decodes else self
        return costs if work.projects else costs._with_other_work(work, added, encode_seconds)

    def _with_other_work(self, work: StepWork, added: float, encode_seconds: float) -> "StepCosts":
        """Return the costs, updated for prompts and images that took *added* seconds."""
        if not work.patch_layers:
            return replace(self, token=_mean(self.token, added / work.tokens))
        if not work.tokens:
            return replace(self, patch_layer=_mean(self.patch_layer, added / work.patch_layers))
        if self.token and self.patch_layer:
            expected = self.token * work.tokens + self.patch_layer * work.patch_layers
            # Which of the two took longer than expected cannot be told: each gets its part of the difference.
            ratio = added / expected
            return replace(
                self,
                token=_mean(self.token, self.token * ratio),
                patch_layer=_mean(self.patch_layer, self.patch_layer * ratio),
            )
        if self.token:
            return replace(self, patch_layer=max(0.0, added - self.token * work.tokens) / work.patch_layers)
        of_images = min(added, self.patch_layer * work.patch_layers or encode_seconds)
        return replace(self, token=(added - of_images) / work.tokens, patch_layer=of_images / work.patch_layers)

    def allowance(self, seconds: float, least_tokens: int) -> Allowance | None:
        """Return what fits next to decodes in a step of *seconds*; None, which means no limit, if *seconds* is 0.

        Even if the decodes leave less than half of these seconds, other work gets half. At least *least_tokens* fit, so
        a prompt goes on however slow the decodes are. Work of unknown cost starts with the least.
        """
        if not seconds:
            return None
        spare = max(seconds - self.decodes, seconds / 2)
        tokens = int(spare / self.token) if self.token else 0
        patch_layers = int(spare / self.patch_layer) if self.patch_layer else 0
        return Allowance(max(least_tokens, tokens), max(1, patch_layers), least_tokens)


def _mean(before: float, measured: float) -> float:
    return (before + measured) / 2 if before else measured
