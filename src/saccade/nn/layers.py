"""Layers with parameters, and the attention of a decoder layer.

Parameters start empty, and the loader fills them. Then `use_operations` sets the operations that the layers compute
with. Shapes: N tokens, Q query heads, K key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional

from saccade.nn.context import SCALED, ForwardContext, KvCache, Scoring
from saccade.nn.cores import map_on_cores
from saccade.nn.formats.quantised import PLAIN_KIND, Part, QuantisedLinear, QuantisedWeight, growth, kinds_of
from saccade.nn.libraries import Unavailable, attempt, kernel
from saccade.nn.ops import PLAIN, Activation, JoinedLinear, Operations, PackedLinear, PlainLinear
from saccade.nn.parallel import ALONE, Ranks, Sharding, Split, shards_of

LEAST_ROUNDED = 128
"""The shortest side of a weight that is rounded: the side of a block of FP8. Shorter ones save nothing."""

NUM_COMPARED = 256
"""About how many rows of a packed matrix are compared with known ones, to find out its layout."""

ROUNDED_TO_INT8 = 0.51 / 127
"""By how much of a row's largest value its rounding to int8 changes another: half of a step, and float32's rounding."""


def finish(module: nn.Module) -> None:
    """Compute the values that follow from loaded weights: call the `finish` of *module*'s parts, and then its own."""
    for part in module.children():
        finish(part)
    if callable(own := getattr(module, "finish", None)):
        own()


class Layer(nn.Module):
    """A module that computes with the operations in *ops*.

    The loader reads *shardings*: by name, the layout of parameters that consist of parts or are cut over ranks. It also
    reads *experts*: how the first dimension is cut in parameters that have one entry for each expert. The sharding of
    such a parameter is that of one entry. The parameters in *float32* keep that dtype in any network.
    """

    ops: Operations = PLAIN
    shardings: Mapping[str, Sharding] = MappingProxyType({})
    experts: Mapping[str, Sharding] = MappingProxyType({})
    float32: tuple[str, ...] = ()

    @property
    def growth_as_plain(self) -> int:
        """How many bytes more the weights that no kernel took would take as plain ones."""
        return 0

    def make_plain(self) -> None:
        """Replace quantised weights with their values."""

    def pack(self) -> None:
        """Bring loaded weights into the layout that the operations take."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; those in *float32* stay in float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in self.float32:
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.float()
        return self


class Linear(Layer):
    """y = x W^T + b. Layers that read the same input can be one layer; *partitions* are their output widths.

    With *split* "outputs", each partition's rows are cut over *ranks*. Partition i consists of units[i] heads, by
    default one for each rank. With "inputs", the columns are cut, and the results are summed over the ranks.

    If the network changes the loaded weight, except for the order of its rows, *is_as_stored* is false. The weight then
    stays plain when others are rounded, so that a rounded copy of the checkpoint has the same weights.
    """

    is_as_stored = True

    def __init__(
        self,
        in_features: int,
        partitions: int | tuple[int, ...],
        bias: bool = True,
        *,
        split: Split | None = None,
        units: tuple[int, ...] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        widths = (partitions,) if isinstance(partitions, int) else partitions
        outputs = Sharding(widths)
        if split == "outputs":
            outputs = Sharding(
                widths, 0, tuple(shards_of(count, ranks) for count in units or (ranks.size,) * len(widths))
            )
        self.partitions, self.split = outputs.lengths(), split
        self.summed_over = ranks if split == "inputs" and ranks.size > 1 else None
        shardings = {"weight": outputs, "bias": outputs}
        if self.summed_over is not None:
            shardings["weight"] = Sharding((in_features,), 1, (ranks.size,))
            in_features = ranks.divide(in_features, "input channels")
        self.shardings = shardings
        out_features = sum(self.partitions)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed: PackedLinear | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Linear":
        """Return a layer without bias that shares a loaded *weight* [out_features, in_features]."""
        with torch.device("meta"):
            layer = cls(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    def hold(self, name: str, parts: tuple[Part, ...]) -> None:
        """Multiply by *parts*, one below the other, instead of the empty weight."""
        self.packed = QuantisedLinear(parts, None if self.summed_over else self.bias)

    @property
    def is_worth_rounding(self) -> bool:
        """Whether rounding saves memory, and a rounded weight can be stored: no side is under LEAST_ROUNDED."""
        return self.is_as_stored and min(*self.partitions, self.weight.shape[1]) >= LEAST_ROUNDED

    def round_weight(self, rounded: Callable[[torch.Tensor], QuantisedWeight]) -> None:
        """Replace the loaded weight with what *rounded* makes of it."""
        self.hold("weight", (rounded(self.weight.data),))
        self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)

    def dequantised(self) -> torch.Tensor:
        """Return the loaded weight [out_features, in_features] of any format. Call it before `pack`."""
        return self.packed.dequantised(self.weight.dtype) if isinstance(self.packed, QuantisedLinear) else self.weight

    @property
    def growth_as_plain(self) -> int:
        """See Layer.growth_as_plain."""
        return growth(self.packed.parts, self.weight.dtype) if isinstance(self.packed, QuantisedLinear) else 0

    def make_plain(self) -> None:
        """Replace a quantised weight with its values. Call it before `pack`, or if that found no kernel."""
        if isinstance(self.packed, QuantisedLinear):
            self.weight = nn.Parameter(self.dequantised(), requires_grad=False)
            self.packed = None

    def reorder_rows(self, order_O: torch.Tensor) -> None:
        """Put the rows of the loaded weight and bias into *order_O* int64; the rows' scales move with them.

        A quantised weight becomes plain if its rows share words or scales, or if its parts differ in format.
        """
        weight = self.packed.reordered(order_O) if isinstance(self.packed, QuantisedLinear) else None
        if weight is None:
            self.make_plain()
            self.weight.data = self.weight.data[order_O]
        if self.bias is not None:
            self.bias.data = self.bias.data[order_O]
        if weight is not None:
            self.hold("weight", (weight,))

    def pack(self) -> None:
        """Pack the loaded weight, and drop the plain one if the packed layout differs.

        Raises Unavailable if no kernel takes a quantised weight, which is then dequantised at each use.
        """
        if isinstance(self.packed, QuantisedLinear):
            layers = tuple(self._pack_quantised(layer) for layer in self.packed.by_kind)
            packed = layers[0] if len(layers) == 1 else JoinedLinear(layers)
            with attempt():
                # A library compiles at the first call, and may fail only then.
                self._multiply_zeros(packed, 1)
            self.packed = packed
            return
        if self.packed is None or isinstance(self.packed, PlainLinear):
            self.packed = self.ops.pack_linear(self.weight, None if self.summed_over else self.bias)
            if not isinstance(self.packed, PlainLinear):
                self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)

    def _pack_quantised(self, layer: QuantisedLinear) -> PackedLinear:
        """Return the packed *layer*, whose parts are of one kind, or plain. Raises Unavailable."""
        kinds = kinds_of(layer.parts)
        if kinds == {PLAIN_KIND}:
            return self.ops.pack_linear(layer.dequantised(self.weight.dtype), layer.bias_O)
        pack_linear = kernel("pack_linear", kinds, self.ops.kernels)
        with attempt():
            return pack_linear(layer)  # type: ignore[no-any-return]

    def compile_kernel(self, num_tokens: int) -> None:
        """Compile the kernel for *num_tokens*, unless it already is. Raises whatever its library raises."""
        if self.packed is not None:
            self._multiply_zeros(self.packed, num_tokens)

    def _multiply_zeros(self, packed: PackedLinear, num_tokens: int) -> None:
        packed.apply(self.weight.new_zeros(num_tokens, self.weight.shape[1]), None)

    def forward(self, x: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        """Map [N, in_features] to [N, out_features], and apply *activation*."""
        if self.summed_over is None:
            return (self.packed or self._plain()).apply(x, activation)
        output = self._sum(x)
        return output if activation is None else activation(output)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return *residual* [N, out_features] + forward(x); may overwrite *residual*."""
        if self.summed_over is not None:
            return residual + self._sum(x)
        return self.add_summand(residual, x)

    def summand(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum for *x*, without its bias; if nothing is summed, the whole output."""
        return (self.packed or self._plain()).apply(x, None)

    def add_summand(self, addend: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return *addend* plus `summand` of *x*; may overwrite *addend*."""
        return (self.packed or self._plain()).add_to(addend, x)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, with the bias added once."""
        output = self.summed_over.all_reduce(self.summand(x))  # type: ignore[union-attr]
        return output if self.bias is None else output + self.bias

    def _plain(self) -> PackedLinear:
        """Return the layer as it is before `pack`."""
        return PlainLinear(self.weight, None if self.summed_over else self.bias)


class Embedding(Layer):
    """Maps each token id to a vector.

    Each of *ranks* holds an equal part of the vectors, or all of them if they do not divide equally.
    """

    def __init__(self, num_ids: int, width: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks.sharing(num_ids)
        self.num_own = num_ids // self.ranks.size
        self.shardings = {"weight": Sharding((num_ids,), 0, (self.ranks.size,))}
        self.weight = nn.Parameter(torch.empty(self.num_own, width), requires_grad=False)
        self.rows_of_head: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Map ids int64 [N] to [N, width]."""
        if self.ranks.size == 1:
            return self._own(ids_N)
        own_N = ids_N - self.ranks.rank * self.num_own
        is_others_N1 = ((own_N < 0) | (own_N >= self.num_own)).unsqueeze(1)
        rows = self._own(own_N.clamp(0, self.num_own - 1))
        return self.ranks.all_reduce(rows.masked_fill_(is_others_N1, 0))

    def _own(self, ids_N: torch.Tensor) -> torch.Tensor:
        if self.rows_of_head is None:
            return self.weight.index_select(0, ids_N)
        return self.rows_of_head(ids_N).to(self.weight.dtype)

    def read_from(self, head: PackedLinear) -> None:
        """Read the vectors from *head*, which was packed from them, and drop the own ones if its layout allows that."""
        # An odd step meets every place of a block.
        step = max(1, self.num_own // NUM_COMPARED) | 1
        some_N = torch.cat((torch.arange(0, self.num_own, step), torch.tensor([self.num_own - 1])))
        known_NE = self.weight[some_N].float()
        tolerance_N1 = known_NE.abs().amax(1, keepdim=True) * ROUNDED_TO_INT8
        for rows in head.possible_rows((self.num_own, self.weight.shape[1])):
            if ((rows(some_N).float() - known_NE).abs() <= tolerance_N1).all():
                self.rows_of_head = rows
                self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)
                return


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Normalise [N, size]."""
        return self.ops.rms_norm(x_NE, self.weight, self.eps)


class FloatNorm(RMSNorm):
    """x / rms(x) * (*offset* + weight) over the last dimension, in float32, rounded once."""

    offset = 0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.scale = torch.empty(0)

    def finish(self) -> None:
        """Compute the scale from the loaded weight."""
        self.scale = self.offset + self.weight.float()

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Normalise [N, size]."""
        return self.ops.rms_norm(x_NE, self.scale, self.eps)


class OffsetNorm(FloatNorm):
    """FloatNorm with the scale 1 + weight, a sum that has too many digits for bfloat16."""

    offset = 1


class LayerNorm(Layer):
    """Layer norm with weight and bias over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Normalise [N, size]."""
        return functional.layer_norm(x_NE, x_NE.shape[-1:], self.weight, self.bias, self.eps)


def head_scales(norms: Sequence[tuple[FloatNorm, int]]) -> torch.Tensor:
    """Return the scales [H, D] of all heads, from each norm and its number of heads: one call then normalises all."""
    return torch.cat([norm.scale.expand(num_heads, -1) for norm, num_heads in norms])


class Attention(NamedTuple):
    """Causal attention of one decoder layer over its paged cache."""

    layer: int
    num_heads: int
    num_kv_heads: int
    scoring: Scoring = SCALED

    def __call__(
        self, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Write keys and values into the layer's cache, attend, and return [N, Q * D]."""
        return context.backend.paged(q_NQD, k_NKD, v_NKD, self.layer, context, self.scoring)

    def attend(
        self, q_NQD: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """Attend after `ops.cached_heads`, which returns the queries and the step's *own* keys and values."""
        return context.backend.attend(q_NQD, own, context.cache(self.layer, KvCache), context, self.scoring)


def layers_of(network: nn.Module) -> Iterator[Layer]:
    """Yield the layers of *network*, with its parts' own."""
    return (module for module in network.modules() if isinstance(module, Layer))


def use_operations(network: nn.Module, operations: Operations) -> list[str]:
    """Make the layers of a loaded *network* compute with *operations*, and pack their weights. Call it once.

    Return the reasons why some quantised weights stay as they are, and are dequantised at each use.
    """

    def fault_of_packing(layer: Layer) -> str | None:
        layer.ops = operations
        try:
            layer.pack()
        except Unavailable as error:
            return error.reason
        return None

    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    return sorted({*filter(None, map_on_cores(fault_of_packing, layers_of(network), device))})
