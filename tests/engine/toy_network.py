"""A network with a layer of every kind of state, and a reference that computes a whole sequence at once.

One layer of paged attention, one of latent attention, one linear recurrence; residual, without norms. The
recurrent layer is naive but right for batches of chunks. The reference shares the weights and no other code.
Shapes: N tokens of a step, L of a sequence, E hidden size, Q query heads, K key/value heads, D head size, W latent
width, R width of a latent's turned part, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from saccade.engine.executor.loader import LoadedModel
from saccade.models.positions import MultimodalPositions
from saccade.models.spec import Grid, KvSpec, Latent, Paged, Recurrent, Size
from saccade.nn.context import ForwardContext, RecurrentState
from saccade.nn.layerwise import Layerwise
from saccade.protocol.description import ModelFiles
from saccade.protocol.media import MediaItem

E, Q, K, D, W, R, V = 32, 4, 2, 8, 12, 4, 67
DECAY = 0.9


@dataclass(frozen=True)
class Spec:
    """models.spec.ModelSpec of a network without images."""

    kv_specs: tuple[KvSpec, ...] = (Paged(K, D, D), Latent(W, R), Recurrent(((D, D), (E,)), ("float32", "float32")))
    vocab_size: int = V
    max_position_embeddings: int = 512
    placeholder_of: Mapping[str, int] = field(default_factory=dict)
    placeholder_token_ids: tuple[int, ...] = ()
    longest_whole: int = 0
    takes_media: bool = False
    drafts: bool = False

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        return 0

    def pixel_shape(self, grid: Grid, modality: str = "image") -> tuple[int, int]:
        return 0, 0

    num_encoder_layers: int = 0

    def encode_cost(self, grid: Grid) -> int:
        return 0

    def encoder_output_values(self, grid: Grid, original_size: Size | None = None) -> int:
        return 0

    def square_grid(self, max_patches: int) -> Grid:
        return 1, 0, 0

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...] | None:
        return None

    def positions(self, media: Sequence[MediaItem]) -> MultimodalPositions:
        return MultimodalPositions([])


WEIGHTS = {
    "embedding": (V, E),
    "paged_q": (Q * D, E), "paged_k": (K * D, E), "paged_v": (K * D, E), "paged_o": (E, Q * D),
    "latent": (W + R, E), "latent_q": (Q * (W + R), E), "latent_o": (E, Q * W),
    "recurrent_q": (D, 2 * E), "recurrent_k": (D, 2 * E), "recurrent_v": (D, 2 * E), "recurrent_o": (E, D),
}  # fmt: skip


def turn(x_NHD: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head by angles that grow with the position."""
    half = x_NHD.shape[-1] // 2
    frequencies = 0.3 ** torch.arange(half, dtype=x_NHD.dtype, device=x_NHD.device)
    angles = (positions_N.to(x_NHD.dtype)[:, None] * frequencies)[:, None, :]
    a, b = x_NHD.split(half, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


class Network(nn.Module):
    """models.network.Network."""

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        draw = torch.Generator().manual_seed(seed)
        for name, shape in WEIGHTS.items():
            weight = torch.randn(shape, generator=draw) / math.sqrt(shape[1])
            self.register_parameter(name, nn.Parameter(weight, requires_grad=False))

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def locate(self, name: str) -> None:
        """Nothing is loaded."""

    def finish(self) -> None:
        """Nothing is derived."""

    def share_head(self) -> None:
        """The head is the embedding itself."""

    def prepare(self, grids: Sequence[Grid], backend: Any) -> Any:
        raise NotImplementedError

    def encode(self, pixels_PC: torch.Tensor, metadata: Any) -> Layerwise:
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_NE = 4 * self.embedding[input_ids]
        x_NE = x_NE + self._paged(x_NE, context)
        x_NE = x_NE + self._latent(x_NE, context)
        return x_NE + self._recurrent(x_NE, context)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden_RE, self.embedding).float()

    def _paged(self, x_NE: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        q, k, v = (functional.linear(x_NE, w) for w in (self.paged_q, self.paged_k, self.paged_v))
        positions = context.positions[0]
        q, k = turn(q.view(-1, Q, D), positions), turn(k.view(-1, K, D), positions)
        return functional.linear(context.backend.paged(q, k, v.view(-1, K, D), 0, context), self.paged_o)

    def _latent(self, x_NE: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        positions = context.positions[0]
        q = functional.linear(x_NE, self.latent_q).view(-1, Q, W + R)
        q = torch.cat((q[..., :W], turn(q[..., W:], positions)), dim=-1)
        latent = functional.linear(x_NE, self.latent)
        latent = torch.cat((latent[:, :W], turn(latent[:, None, W:], positions)[:, 0]), dim=-1)
        attended = context.backend.latent(q, latent, 1, context, value_width=W, scale=(W + R) ** -0.5)
        return functional.linear(attended.flatten(1), self.latent_o)

    def _recurrent(self, x_NE: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        state = context.kv_caches[2]
        assert isinstance(state, RecurrentState)
        layout, outputs_ND = context.layout, x_NE.new_empty((len(x_NE), D))
        for one in layout.turns:
            outputs_ND[one.tokens] = self._remember(x_NE[one.tokens], state, one.rows, one.lengths, one.trail)
            state.save(one)
        if not layout.turns:
            outputs_ND = self._remember(x_NE, state, layout.rows, layout.query_lengths)
        return functional.linear(outputs_ND, self.recurrent_o)

    def _remember(
        self,
        x_NE: torch.Tensor,
        state: RecurrentState,
        rows: torch.Tensor,
        lengths: tuple[int, ...],
        trail: torch.Tensor | None = None,
    ) -> torch.Tensor:
        live, previous = state.live
        outputs = []
        for number, span in enumerate(_spans(lengths)):
            row = rows[number : number + 1].long()
            memory_DD, last_E = live.index_select(0, row)[0], previous.index_select(0, row)[0]
            for token, x_E in enumerate(x_NE[span]):
                pair = torch.cat((x_E, last_E))
                q, k, v = (weight @ pair for weight in (self.recurrent_q, self.recurrent_k, self.recurrent_v))
                memory_DD = DECAY * memory_DD + torch.outer(k, v)
                outputs.append(q @ memory_DD / D)
                last_E = x_E
                after = row if trail is None else trail[number, token : token + 1]
                live.index_copy_(0, after, memory_DD[None])
                previous.index_copy_(0, after, last_E[None])
        return torch.stack(outputs)


def _spans(lengths: tuple[int, ...]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def load(seed: int = 0) -> LoadedModel:
    """The network as the loader would return it."""
    network = Network(Spec(), seed)
    return LoadedModel(network, network, ModelFiles(files={}), bytes(32), sum(p.numel() for p in network.parameters()))


def reference(network: Network, token_ids: list[int]) -> torch.Tensor:
    """Return the logits [L, V] behind each token of a sequence, in float64."""
    weights = {name: parameter.double() for name, parameter in network.named_parameters()}
    index = torch.arange(len(token_ids))
    is_seen = index <= index[:, None]
    x = 4 * weights["embedding"][token_ids]

    q, k, v = (x @ weights[f"paged_{name}"].T for name in "qkv")
    q, k = turn(q.view(-1, Q, D), index), turn(k.view(-1, K, D), index).repeat_interleave(Q // K, 1)
    scores = torch.einsum("nqd,lqd->qnl", q, k) / math.sqrt(D)
    shares = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    values = v.view(-1, K, D).repeat_interleave(Q // K, 1)
    x = x + torch.einsum("qnl,lqd->nqd", shares, values).flatten(1) @ weights["paged_o"].T

    latent, turned = (x @ weights["latent"].T).split((W, R), -1)
    q, q_turned = (x @ weights["latent_q"].T).view(-1, Q, W + R).split((W, R), -1)
    scores = torch.einsum("nqw,lw->qnl", q, latent)
    scores = scores + torch.einsum("nqr,lr->qnl", turn(q_turned, index), turn(turned[:, None], index)[:, 0])
    shares = (scores / math.sqrt(W + R)).masked_fill(~is_seen, float("-inf")).softmax(-1)
    x = x + torch.einsum("qnl,lw->nqw", shares, latent).flatten(1) @ weights["latent_o"].T

    pairs = torch.cat((x, torch.cat((torch.zeros(1, E), x[:-1]))), -1)
    q, k, v = (pairs @ weights[f"recurrent_{name}"].T for name in "qkv")
    # A sum over all tokens before, where the network keeps a running one.
    decays = DECAY ** (index[:, None] - index).clamp(min=0).double() * is_seen
    x = x + (q @ k.T * decays) @ v / D @ weights["recurrent_o"].T
    return x @ weights["embedding"].T
