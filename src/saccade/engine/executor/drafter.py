"""Draft the tokens after the one that a step draws, with the network's own draft layer.

For each token of a sequence but the first, the layer has an entry of keys and values. These are computed from the
token's embedding and the hidden state of the token before it. The entry has the position and the slot of the token
before it. So a step writes the entries of the tokens that it draws, and of its own tokens except each chunk's first.
The next chunk writes the entry of its first token, from the last hidden state and position. A row keeps these like a
recurrent state: in checkpoints, after proposals, and in transfers. A chunk that follows a draw of its row needs no such
entry. After a cached prefix, the entry depends on the token that follows. Sequences that go on differently overwrite
each other's entry, which can only lower the number of accepted drafts.

After the last accepted token, the layer goes on from its own drafts and states, in slots that the next step overwrites.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from saccade.engine.core.step import Chunk, StepInput
from saccade.engine.executor.batch import Batch, RowBuffers, build_batch
from saccade.engine.executor.caches import Caches
from saccade.models.network import Network
from saccade.nn.context import AttentionBackend, ForwardContext, RecurrentState
from saccade.nn.parallel import Ranks
from saccade.nn.transfer import to_device


class Drafting(NamedTuple):
    """A step to draft for: embeddings *x* and *hidden* states [N, E], and the backend's plan, None after a graph."""

    step: StepInput
    batch: Batch
    x: torch.Tensor
    hidden: torch.Tensor
    plan: Any


class Drafts(NamedTuple):
    """The draft layer's *states* [N, E], and its drafts, if a step asks for any.

    *token_ids* is int64 [len(step.drafts), num_drafts], -1 if there is no draft. Only the drafts after a row's last
    accepted token are longer than one.
    """

    states: torch.Tensor
    token_ids: torch.Tensor | None = None


class _LastDraw(NamedTuple):
    """The draw after a row's last accepted token, at index *place*; it is number *draft* of the step's drafts."""

    draft: int
    row: int
    place: int


class Drafter:
    """The draft layer of *network*, whose caches are the last two of *caches*. It drafts *num_drafts* tokens."""

    def __init__(
        self, network: Network, backend: AttentionBackend, caches: Caches, rows: RowBuffers, ranks: Ranks
    ) -> None:
        state = caches.layers[-1]
        if not isinstance(state, RecurrentState):
            raise TypeError(f"the last cache of a network with a draft layer is a {type(state).__name__}")
        self._network, self._backend, self._caches, self._rows, self._state = network, backend, caches, rows, state
        self._ranks, self.num_drafts = ranks, caches.sizes.num_kept

    def begin_drafts(
        self, step: StepInput, batch: Batch, features: torch.Tensor | None, hidden: torch.Tensor, plan: Any
    ) -> Drafting:
        """Write the entries of the chunks' first tokens, and keep the last hidden states.

        Call this before states are saved.

        *features* are those of the batch's media, *hidden* and *plan* those of the network's layers.
        """
        x = self._network.embed(batch.input_ids, batch.media_rows, features)
        resumed = [chunk for chunk in step.chunks if chunk.start and chunk.token_ids and not chunk.num_proposed]
        if resumed:
            self._resume(resumed, batch, x)
        layout = batch.layout
        for turn in layout.turns:
            mine = hidden.index_select(0, turn.tokens), batch.positions.index_select(1, turn.tokens)
            if turn.trail is None:
                self._keep(turn.rows, *mine, turn.lengths)
            else:
                self._keep(turn.trail.flatten(), *mine, (1,) * len(turn.tokens))
            self._state.save(turn)
        if not layout.turns:
            self._keep(layout.rows, hidden, batch.positions, layout.query_lengths)
        return Drafting(step, batch, x, hidden, plan)

    def draft(self, drafting: Drafting, drawn_R: torch.Tensor | None) -> Drafts:
        """Write the other entries, with the tokens that were drawn, and draft if the step asks for it."""
        step, batch, x, hidden, plan = drafting
        # Each place gets the token after it; the last place of a chunk without draws gets it with the next chunk. Until
        # then it has zeros: the next row's token may be of another sequence, and not finite.
        x = x.roll(-1, 0)
        ends = np.cumsum([chunk.num_tokens for chunk in step.chunks]) - 1
        if len(open_ends := ends[[not chunk.draws for chunk in step.chunks]]):
            x.index_fill_(0, to_device(open_ends, x.device), 0)
        if drawn_R is not None:
            x.index_copy_(0, batch.sample_rows, self._network.embed(drawn_R))
        if plan is None:
            plan = self._backend.plan(batch.layout, x.dtype)
        context = ForwardContext(batch.positions, batch.layout, self._caches.layers, self._backend, plan)
        states = self._network.draft(x, hidden, context)
        if drawn_R is None or not step.drafts:
            return Drafts(states)
        draws = to_device(np.array(step.drafts, np.int64), x.device)
        drawn_states = states.index_select(0, batch.sample_rows.index_select(0, draws))
        drafts = torch.full((len(draws), self.num_drafts), -1, dtype=torch.int64, device=x.device)
        drafts[:, 0] = self._predict(drawn_states)
        if self.num_drafts > 1:
            self._go_on(list(_last_draws(step, drawn_R.tolist())), drawn_states, drafts)
        return Drafts(states, drafts)

    def _go_on(self, lasts: list[_LastDraw], states: torch.Tensor, drafts: torch.Tensor) -> None:
        """Draft further tokens after *lasts*, as far as their rows have slots; overwrites *states*."""
        block_size, device = self._caches.sizes.block_size, states.device
        for number in range(1, self.num_drafts):
            lasts = [one for one in lasts if one.place + number < self._rows.num_blocks[one.row] * block_size]
            if not lasts:
                return
            if device.type == "cuda":
                # Backends keep the plans of two calls, and kernels may still read the last one.
                torch.cuda.current_stream().synchronize()
            chunks = [Chunk(one.row, one.place + number, 1, (0,)) for one in lasts]
            batch = build_batch(chunks, self._rows, block_size, device)
            plan = self._backend.plan(batch.layout, states.dtype)
            context = ForwardContext(batch.positions, batch.layout, self._caches.layers, self._backend, plan)
            index = to_device(np.array([one.draft for one in lasts], np.int64), device)
            x = self._network.embed(drafts[:, number - 1].index_select(0, index))
            following = self._network.draft(x, states.index_select(0, index), context)
            states.index_copy_(0, index, following)
            drafts[:, number].index_copy_(0, index, self._predict(following))

    def _predict(self, states_RE: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens int64 [R], on every rank; rank 0 has all logits."""
        return self._ranks.broadcast(self._network.logits(states_RE).max(dim=-1).indices, 0)

    def _resume(self, chunks: list[Chunk], batch: Batch, x: torch.Tensor) -> None:
        """Write the entries of the first tokens of *chunks*."""
        before = [Chunk(chunk.row, chunk.start - 1, 1, (0,)) for chunk in chunks]
        layout = build_batch(before, self._rows, self._caches.sizes.block_size, x.device).layout
        first = to_device(np.array([batch.starts[chunk.row] for chunk in chunks], np.int64), x.device)
        hidden, positions = (part.index_select(0, layout.rows) for part in self._state.live)
        context = ForwardContext(positions.t().long(), layout, self._caches.layers, self._backend, None)
        self._network.draft(x.index_select(0, first), hidden, context, attends=False)

    def _keep(
        self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, lengths: tuple[int, ...]
    ) -> None:
        """Keep the last *hidden* state and position of each row; a row's tokens follow those of the row before."""
        last = to_device(np.cumsum(lengths, dtype=np.int64) - 1, hidden.device)
        for live, values in zip(self._state.live, (hidden, positions.t().float()), strict=True):
            live.index_copy_(0, rows.long(), values.index_select(0, last))


def _last_draws(step: StepInput, drawn: list[int]) -> Iterator[_LastDraw]:
    """Yield the last draws that the step asks drafts for; *drawn* are the tokens of all draws."""
    index_of, draw = {number: index for index, number in enumerate(step.drafts)}, 0
    for chunk in step.chunks:
        first, draw = draw, draw + chunk.num_draws
        proposed = (chunk.token_ids or ())[chunk.num_tokens - chunk.num_proposed :]
        pairs = enumerate(zip(proposed, drawn[first:draw], strict=False))
        accepted = next((number for number, (one, other) in pairs if one != other), len(proposed))
        if chunk.draws and first + accepted in index_of:
            place = chunk.start + chunk.num_tokens - chunk.num_draws + accepted
            yield _LastDraw(index_of[first + accepted], chunk.row, place)
