"""The network in training: transformers' Qwen3-VL, heads that are thrown away, and a batched way through both halves.

transformers runs the attention of the vision tower picture by picture, which on a CPU costs more than the rest.  In
training all pictures of a batch have one size, so the functions here push the whole batch through the modules of the
very same model at once.  `largest_difference` compares the two ways; training starts with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

COLUMNS = 4
"""Columns a merged token is cut into for the direct loss, each 8 pixels wide."""
LONGEST = 8
"""The longest text the index head can count."""


@dataclass(frozen=True)
class Seen:
    """What the vision tower makes of a batch: merged tokens and the deepstack features, each (batch, tokens, width)."""

    tokens: Tensor
    deep: tuple[Tensor, ...]


class Heads(nn.Module):
    """Linear heads on the merged tokens; only training has them.

    They say for every column of every token which character covers it, the how manieth it is, and the text's colour.
    Characters and places have known answers as the drawing knows its boxes, so this loss teaches the eye directly.
    """

    def __init__(self, width: int, characters: int, colours: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.character = nn.Linear(width, COLUMNS * (characters + 1))
        self.place = nn.Linear(width, COLUMNS * LONGEST)
        self.colour = nn.Linear(width, colours)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits: (batch, tokens, columns, characters + 1), (batch, tokens, columns, places), (batch, colours)."""
        read = self.norm(tokens)
        characters = self.character(read).unflatten(-1, (COLUMNS, -1))
        places = self.place(read).unflatten(-1, (COLUMNS, -1))
        return characters, places, self.colour(read.mean(1))


class Eye(nn.Module):
    """The vision tower over a batch of equally large pictures."""

    indices: Tensor
    weights: Tensor
    cosine: Tensor
    sine: Tensor

    def __init__(self, tower: Any, grid: tuple[int, int]) -> None:
        super().__init__()
        self.tower = tower
        shape = torch.tensor([[1, *grid]])
        indices, weights = get_vision_interpolation_indices_and_weights(
            shape,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
            kwargs={},
        )
        places = get_vision_position_ids(shape, tower.spatial_merge_size, kwargs={})
        cosine, sine = tower.rotary_pos_emb(weights, places)
        for name, value in (("indices", indices), ("weights", weights), ("cosine", cosine), ("sine", sine)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, patches: Tensor) -> Seen:
        """Patches are (batch, patches, 3 * 16 * 16) in the order of the merger.

        A still picture fills both times of the kernel with the same pixels, so the two halves of it act as their sum.
        """
        tower, (batch, count, _) = self.tower, patches.shape
        kernel = tower.patch_embed.proj
        state = F.linear(patches, kernel.weight.sum(2).flatten(1), kernel.bias)
        state = state + (tower.pos_embed(self.indices) * self.weights[:, :, None]).sum(1)
        deep = []
        for number, block in enumerate(tower.blocks):
            state = state + self._attend(block.attn, block.norm1(state))
            state = state + block.mlp(block.norm2(state))
            if number in tower.deepstack_visual_indexes:
                merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)]
                deep.append(merger(state).unflatten(0, (batch, count // 4)))
        return Seen(tower.merger(state).unflatten(0, (batch, count // 4)), tuple(deep))

    def _attend(self, attention: Any, state: Tensor) -> Tensor:
        batch, count, width = state.shape
        joined = attention.qkv(state).view(batch, count, 3, attention.num_heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, self.cosine, self.sine), rotate(key, self.cosine, self.sine)
        mixed = attend(query, key, value, attention.scaling)
        return attention.proj(mixed.transpose(1, 2).reshape(batch, count, width))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Layout:
    """Where everything in a batch of sequences lies."""

    cosine: Tensor
    """(batch, 1, length, head width), as is `sine`."""
    sine: Tensor
    spread: Tensor | None
    """(batch, length, tokens): one where a position holds a picture's token.  None without pictures."""


class Mouth(nn.Module):
    """The language model over a batch of sequences padded at the end."""

    def __init__(self, language: Any) -> None:
        super().__init__()
        self.language = language

    def layout(self, places: Tensor, spread: Tensor | None) -> Layout:
        """`places` is (3, batch, length), the M-RoPE positions."""
        cosine, sine = self.language.rotary_emb(torch.zeros(()), places)
        return Layout(cosine[:, None], sine[:, None], spread)

    def forward(self, ids: Tensor, seen: Seen | None, layout: Layout) -> Tensor:
        """The final hidden states, (batch, length, width)."""
        language, spread = self.language, layout.spread
        state = language.embed_tokens(ids).float()
        if seen is not None and spread is not None:
            state = state * (1 - spread.sum(-1, keepdim=True)) + spread @ seen.tokens
        for number, layer in enumerate(language.layers):
            state = state + self._attend(layer.self_attn, normed(layer.input_layernorm, state), layout)
            state = state + layer.mlp(normed(layer.post_attention_layernorm, state))
            if seen is not None and spread is not None and number < len(seen.deep):
                state = state + spread @ seen.deep[number]
        return normed(language.norm, state)

    def _attend(self, attention: Any, state: Tensor, layout: Layout) -> Tensor:
        batch, length, _ = state.shape
        shape = (batch, length, -1, attention.head_dim)
        query = normed(attention.q_norm, attention.q_proj(state).view(shape)).transpose(1, 2)
        key = normed(attention.k_norm, attention.k_proj(state).view(shape)).transpose(1, 2)
        value = attention.v_proj(state).view(shape).transpose(1, 2)
        query, key = rotate(query, layout.cosine, layout.sine), rotate(key, layout.cosine, layout.sine)
        groups = attention.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        # Padding lies behind everything that is learned, so causality alone hides it.
        unseen = torch.full((length, length), float("-inf")).triu(1)
        mixed = attend(query, key, value, attention.scaling, unseen)
        return attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attention by plain products: for some thirty tokens much faster in training than torch's fused CPU kernel."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


def normed(norm: Any, state: Tensor) -> Tensor:
    """An RMSNorm module of the language model by torch's own function."""
    return F.rms_norm(state.float(), norm.weight.shape, norm.weight, norm.variance_epsilon)


def rotate(state: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding in halves; keeps the type."""
    left, right = state.float().chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    return (state.float() * cosine + turned * sine).to(state.dtype)


@torch.no_grad()
def largest_difference(
    model: Qwen3VLForConditionalGeneration, patches: Tensor, grid: tuple[int, int], ids: Tensor, layout: Layout
) -> float:
    """How far the batched way is from transformers' own forward, over all logits of one batch."""
    batch = len(ids)
    theirs = model(
        input_ids=ids,
        pixel_values=doubled(patches).flatten(0, 1),
        image_grid_thw=torch.tensor([[1, *grid]] * batch),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
    ).logits
    seen = Eye(model.model.visual, grid)(patches)
    ours = model.lm_head(Mouth(model.model.language_model)(ids, seen, layout))
    return float((theirs - ours).abs().max())


def doubled(patches: Tensor) -> Tensor:
    """Patches as Qwen3-VL takes them: each channel twice, for the two times a still picture fills."""
    shape = (*patches.shape[:2], 3, 1, -1)
    return patches.view(shape).expand(-1, -1, -1, 2, -1).flatten(2)
