"""Manages checkpoints of recurrent states, and the copies that steps make between them and running rows.

A recurrent state does not contain earlier states, so a sequence can resume only from a copy that was kept. Every
running row has its own live state, so a sequence never waits for a checkpoint. The number of checkpoints is fixed; the
least recently used one is evicted first.

Does not import torch.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Ordered

from saccade.engine.core.kv.resume_points import resume_points
from saccade.engine.core.sequence import Sequence, row_of
from saccade.engine.core.step import StateMove, StateSave
from saccade.protocol.kv_events import KvEvent, StateRemoved, StateStored

Moves = tuple[StateMove, ...]
Saves = Mapping[Sequence, tuple[StateSave, ...]]


class StateCheckpoints:
    """Manages checkpoints 0 to num_checkpoints - 1, keyed by block key.

    A state is kept at boundaries: every *interval_blocks* blocks, and at the prompt's resume points. A chunk may have
    several boundaries. An admitted sequence's checkpoint stays until a step has restored it. A checkpoint that a step
    saves can be reused once the step is committed. *on_event* is called for every checkpoint that becomes reusable or
    is dropped.
    """

    def __init__(self, num_checkpoints: int, block_size: int, interval_blocks: int) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_event: Callable[[KvEvent], None] | None = None
        self._block_size = block_size
        self._interval = interval_blocks * block_size
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._checkpoint_of: OrderedDict[bytes, int] = OrderedDict()
        self._points: dict[Sequence, frozenset[int]] = {}
        self._resume_keys: dict[Sequence, bytes] = {}
        self._saving: dict[bytes, tuple[Sequence, int]] = {}

    @property
    def num_held(self) -> int:
        """The number of checkpoints that admitted sequences have yet to restore, or that steps in flight save."""
        return len(set(self._resume_keys.values())) + len(self._saving)

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        """Return the number of blocks in the longest prefix that has a checkpoint."""
        return next((count for count in range(num_blocks, 0, -1) if keys[count - 1] in self._checkpoint_of), 0)

    def last_due(self, num_blocks: int) -> int:
        """Return the number of blocks before the last checkpoint that every prompt of *num_blocks* saves."""
        return num_blocks - num_blocks % (self._interval // self._block_size)

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_cached: int) -> None:
        """Choose the resume points of *sequence*, and keep the checkpoint after *keys* until the sequence's first step.

        *num_cached* blocks are cached, with or without a state after them.
        """
        self._points[sequence] = resume_points(sequence, self._block_size, len(keys), num_cached)
        if keys:
            self._resume_keys[sequence] = keys[-1]
            self._checkpoint_of.move_to_end(keys[-1])

    def awaits_tokens(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the next *num_tokens* reach a boundary after an unknown token, which the state's key needs."""
        return max(self._boundaries(sequence, num_tokens), default=0) > sequence.num_tokens

    def moves(self, sequences: Iterable[Sequence], chunks: Mapping[Sequence, int]) -> tuple[Moves, Saves]:
        """Return the moves that restore states for *sequences*, and the states that *chunks* of these lengths save.

        Call it once per step, so that a checkpoint that the step restores is not evicted for one that it saves. If
        there are too few checkpoints, each chunk's last states come first.
        """
        restore = tuple(
            StateMove(row_of(sequence), self._checkpoint_of[self._resume_keys.pop(sequence)])
            for sequence in sequences
            if sequence in self._resume_keys
        )
        restored = {move.checkpoint for move in restore}
        places = [
            (num_tokens - stop + owner.num_launched_tokens, owner, stop)
            for owner, num_tokens in chunks.items()
            for stop in self._boundaries(owner, num_tokens)
        ]
        saves: dict[Sequence, tuple[StateSave, ...]] = {}
        for _, owner, stop in sorted(places, key=lambda place: place[0]):
            if (checkpoint := self._checkpoint_to_save(owner, stop, restored)) is not None:
                save = StateSave(stop - owner.num_launched_tokens, checkpoint)
                saves[owner] = (save, *saves.get(owner, ()))
        return restore, saves

    def commit(self, sequence: Sequence, key: bytes) -> None:
        """If a step of *sequence* saved a checkpoint under *key*, make the checkpoint reusable."""
        owner, checkpoint = self._saving.get(key, (None, 0))
        if owner is sequence:
            del self._saving[key]
            self._checkpoint_of[key] = checkpoint
            if self.on_event is not None:
                self.on_event(StateStored(key))

    def release_sequence(self, sequence: Sequence) -> None:
        """Drop the resume points of *sequence*, and its checkpoints that are not yet restored or committed."""
        self._points.pop(sequence, None)
        self._resume_keys.pop(sequence, None)
        for key in [key for key, (owner, _) in self._saving.items() if owner is sequence]:
            self._free.append(self._saving.pop(key)[1])

    def forget_checkpoints(self, keys: Collection[bytes]) -> None:
        """Drop the checkpoints under *keys*.

        The caller must release sequences that wait for one before it plans the next step.
        """
        for key in [key for key in self._checkpoint_of if key in keys]:
            self._free.append(self._drop(key))

    def clear(self) -> None:
        """Drop every checkpoint that no sequence waits for."""
        resume_keys = set(self._resume_keys.values())
        for key in [key for key in self._checkpoint_of if key not in resume_keys]:
            self._free.append(self._drop(key))

    def snapshot(self) -> Iterator[StateStored]:
        """Return every checkpoint that is reusable now; later changes are not included."""
        return map(StateStored, list(self._checkpoint_of))

    def _boundaries(self, sequence: Sequence, num_tokens: int) -> set[int]:
        """Return the boundaries that the next *num_tokens* of *sequence* reach."""
        if not self.num_checkpoints:
            return set()
        start = sequence.num_launched_tokens
        stops = {*range(start - start % self._interval, start + num_tokens + 1, self._interval)}
        if start < sequence.num_prompt_tokens:
            stops |= self._points.get(sequence, frozenset())
        return {stop for stop in stops if start < stop <= start + num_tokens}

    def _checkpoint_to_save(self, sequence: Sequence, stop: int, restored: Set[int]) -> int | None:
        """Return a checkpoint for the state after the first *stop* tokens.

        Return None if that state is kept or being saved already, or if every checkpoint is in use.
        """
        key = sequence.block_keys(stop // self._block_size, self._block_size)[-1]
        if key in self._checkpoint_of:
            self._checkpoint_of.move_to_end(key)
            return None
        if key in self._saving:
            return None
        checkpoint = self._free.pop() if self._free else self._evict(restored)
        if checkpoint is not None:
            self._saving[key] = sequence, checkpoint
        return checkpoint

    def _evict(self, restored: Set[int]) -> int | None:
        in_use = restored | {self._checkpoint_of[key] for key in self._resume_keys.values()}
        key = next((key for key, checkpoint in self._checkpoint_of.items() if checkpoint not in in_use), None)
        return None if key is None else self._drop(key)

    def _drop(self, key: bytes) -> int:
        """Forget *key*, and return its checkpoint."""
        if self.on_event is not None:
            self.on_event(StateRemoved(key))
        return self._checkpoint_of.pop(key)
