"""The schedule of one step, and the builder that makes it. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.engine.core.images import EncoderKey
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Proposal
from saccade.engine.core.step import EncoderSlice, KvReceive, KvSend
from saccade.engine.core.step_costs import NO_WORK, Allowance, StepWork
from saccade.errors import SaccadeError


@dataclass(frozen=True)
class Budgets:
    """The limits for one step and for waiting sequences."""

    max_num_seqs: int
    """Sequences that run at a time: rows."""
    max_num_batched_tokens: int
    """Tokens of a step."""
    encode_budget_patches: int
    """Patches that a step encodes."""
    max_num_waiting: int = 1024
    """Requests that wait."""
    whole_images: bool = False
    """Whether no chunk may end inside an image, because the image's tokens see each other. A chunk ends before the
    image; one that begins with an image holds all of it, beyond the step's budget if necessary."""
    step_seconds: float = 0.0
    """The time that a step with decodes should take at most; 0 for no limit."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of one step."""

    chunks: Mapping[Sequence, int]
    """The number of tokens of each sequence."""
    encode: Mapping[EncoderKey, bytes] = field(default_factory=dict)
    """The pixels of images to encode, or to begin, before them."""
    slices: Mapping[EncoderKey, EncoderSlice] = field(default_factory=dict)
    """The layers to compute of images that several steps encode."""
    lacking: Mapping[Sequence, list[int]] = field(default_factory=dict)
    """Sequences to park, with the indices of the images whose pixels are missing."""
    unreadable: Mapping[Sequence, SaccadeError] = field(default_factory=dict)
    """Sequences that fail, because the pixels of an image could not be read."""
    admitted: Mapping[Sequence, int] = field(default_factory=dict)
    """Sequences with room for the state that a prefill worker sends, and their number of cached blocks."""
    proposals: Mapping[Sequence, Proposal] = field(default_factory=dict)
    """Sequences that compute their last token and these."""
    work: StepWork = NO_WORK
    """What the step's time depends on."""

    @property
    def encoded(self) -> list[EncoderKey]:
        """The images whose features are complete after this step."""
        return [key for key in self.images if completes(key, self.encode, self.slices)]

    @property
    def images(self) -> list[EncoderKey]:
        """The images that this step encodes, or computes layers of."""
        return list(dict.fromkeys((*self.encode, *self.slices)))


def completes(key: EncoderKey, encode: Mapping[EncoderKey, bytes], slices: Mapping[EncoderKey, EncoderSlice]) -> bool:
    """Return whether the features of *key* are complete after a step that begins *encode* and computes *slices*."""
    part = slices.get(key)
    return key in encode if part is None else part.num_layers is None


class KvCopies(NamedTuple):
    """The state that a step receives from other engines, and the state that it copies for them."""

    receive: tuple[KvReceive, ...] = ()
    send: tuple[KvSend, ...] = ()


NO_COPIES = KvCopies()


@dataclass(slots=True)
class ScheduleBuilder:
    """Builds a Schedule, and counts what is left of its budgets."""

    tokens: int
    """Tokens that the step may still compute."""
    patch_layers: int = 0
    """Layers of patches that it may still encode."""
    allowance: Allowance | None = None
    """What it may do next to decodes, if there are any."""
    num_prompt_tokens: int = 0
    """Tokens of prompts that it computes."""
    num_patch_layers: int = 0
    """Layers of patches that it encodes."""
    runs_encoder_layers: bool = False
    """Whether they are not all of projectors."""
    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, bytes] = field(default_factory=dict)
    slices: dict[EncoderKey, EncoderSlice] = field(default_factory=dict)
    lacking: dict[Sequence, list[int]] = field(default_factory=dict)
    unreadable: dict[Sequence, tuple[EncoderKey, SaccadeError]] = field(default_factory=dict)
    admitted: dict[Sequence, int] = field(default_factory=dict)
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)

    def finish_schedule(self) -> Schedule:
        """Return the schedule.

        A sequence that cannot read an image does not fail if another sequence provides the image.
        """
        unreadable = {one: error for one, (key, error) in self.unreadable.items() if key not in self.encode}
        decodes = any(owner.is_decoding for owner in self.chunks)
        projects = bool(self.num_patch_layers) and not self.runs_encoder_layers
        work = StepWork(decodes, self.num_prompt_tokens, self.num_patch_layers, projects)
        return Schedule(
            *(self.chunks, self.encode, self.slices, self.lacking), unreadable, self.admitted, self.proposals, work
        )

    def room(self, sequence: Sequence) -> int:
        """Return how many more tokens of *sequence* the step may compute."""
        if self.allowance is None or sequence.num_pending_tokens == 1:
            return self.tokens
        return min(self.tokens, self.allowance.tokens_with(self.num_patch_layers) - self.num_prompt_tokens)

    @property
    def patch_layers_left(self) -> int:
        """The layers of patches that the step may still encode, next to its decodes and prompts."""
        if self.allowance is None:
            return self.patch_layers
        left = self.allowance.patch_layers_with(self.num_prompt_tokens) - self.num_patch_layers
        return max(0, min(self.patch_layers, left))

    def add_patch_layers(self, count: int) -> None:
        """Add *count* layers of patches to those that the step encodes."""
        self.num_patch_layers += count
        self.patch_layers = max(0, self.patch_layers - count)
