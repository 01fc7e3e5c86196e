"""The attention of transformers' decoders in the engine's paged cache, and the trial that says what it must compute.

transformers asks two registries: one for the function that attends, one for the function that makes masks. It gives a
function without a mask function no mask, and says nothing. So both are registered here, and the mask function's result
says which tokens a layer sees. Before any weights are loaded, the trial runs a decoder on the meta device. Whatever it
asks for that the cache does not compute is refused by name.

Shapes: N tokens, Q query heads, K key/value heads, D head size, W width of a value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saccade.errors import StartupError
from saccade.models.spec import Paged
from saccade.nn.context import ForwardContext, Scoring

NAME = "saccade"
"""Of the functions in both registries."""

MASK_AXES = 4
UNUSED = frozenset({"dropout", "is_causal", "use_cache", "position_ids", "output_attentions", "output_hidden_states"})
"""Options of an attention function that change nothing here; `is_causal` is checked on the layer."""


class Attends(Protocol):
    """What a decoder's forward pass hands to each of its layers."""

    def attend(
        self, layer: Any, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor, call: "Call"
    ) -> torch.Tensor:
        """Return [N, Q * W]."""


class Call(NamedTuple):
    """How a layer asks to attend: its mask, and options by name."""

    mask: torch.Tensor | None
    scale: float | None
    soft_cap: float | None
    window: int | None
    options: Mapping[str, Any]


class Step(NamedTuple):
    """A step of the engine; *scorings* are those of the trial, by layer."""

    context: ForwardContext
    scorings: Mapping[int, Scoring]

    def attend(
        self, layer: Any, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Attend over the cache of *layer*."""
        number = layer.layer_idx
        scoring = self.scorings[number]
        context = self.context.of_window(scoring.window)
        return context.backend.paged(q_NQD, k_NKD, v_NKW, number, context, scoring)


class Apart(NamedTuple):
    """Attention within one sequence, without a cache: two passes over the same sequence can be compared."""

    scorings: Mapping[int, Scoring]

    def attend(
        self, layer: Any, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Attend to earlier tokens of the sequence, within the window of *layer*."""
        scoring, places = self.scorings[layer.layer_idx], torch.arange(len(q_NQD), device=q_NQD.device)
        visible = places <= places.unsqueeze(1)
        if scoring.window is not None:
            visible &= places > places.unsqueeze(1) - scoring.window
        q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in (q_NQD, k_NKD, v_NKW))
        output = functional.scaled_dot_product_attention(q, k, v, visible, scale=scoring.scale, enable_gqa=True)
        return output.squeeze(0).transpose(0, 1).flatten(1)


@dataclass
class Trial:
    """A decoder's layers as they ask to attend, by number. Raises StartupError for what the cache does not compute."""

    scorings: dict[int, Scoring] = field(default_factory=dict)
    kv_specs: dict[int, Paged] = field(default_factory=dict)

    def attend(
        self, layer: Any, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Note what *layer* asks for, and return an empty result."""
        number = getattr(layer, "layer_idx", None)
        if number is None or number in self.scorings:
            raise _refusal("attends several times in a layer, or in one without a number")
        if call.mask is None or call.mask.shape[: MASK_AXES - 1] != (1, 1, 1):
            raise _refusal("makes the mask of its attention itself")
        if not getattr(layer, "is_causal", True) or call.options.get("is_causal") is False:
            raise _refusal("lets tokens attend to later ones")
        if unknown := sorted(name for name, value in call.options.items() if name not in UNUSED and value is not None):
            raise _refusal(f"has attention with {', '.join(unknown)}")
        window = call.mask.shape[-1] or None
        if call.window not in (None, window):
            raise _refusal(f"has a layer with a window of {call.window} and a mask of {window}")
        self.scorings[number] = Scoring(call.scale, window, call.soft_cap)
        self.kv_specs[number] = Paged(k_NKD.shape[1], k_NKD.shape[2], v_NKW.shape[2], window)
        return q_NQD.new_empty(q_NQD.shape[0], q_NQD.shape[1] * v_NKW.shape[2])


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged: Attends,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention function for one row of N tokens: heads [1, heads, N, D] to [1, N, Q, W]."""
    q_NQD, k_NKD, v_NKW = (heads.squeeze(0).transpose(0, 1) for heads in (query, key, value))
    call = Call(attention_mask, scaling, options.pop("softcap", None), options.pop("sliding_window", None), options)
    return paged.attend(module, q_NQD, k_NKD, v_NKW, call).view(1, *q_NQD.shape[:2], -1), None


def mask(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Implement transformers' mask function: return an empty mask whose last axis has the window's size, or 0.

    On the meta device, raise StartupError unless *mask_function* is that of causal attention with this window.
    """
    if torch.device(device).type == "meta":
        _check_pattern(mask_function, local_size)
    return torch.empty((1, 1, 1, local_size or 0), dtype=torch.bool, device="meta")


def _check_pattern(mask_function: Callable[..., torch.Tensor], window: int | None) -> None:
    """Raise StartupError unless *mask_function* shows a token itself and earlier ones, within *window* if it has one.

    The places that are compared lie around the borders of a window.
    """
    borders = (1, 2, 3, 7, 64, 4099) if window is None else (1, 2, window, 2 * window, 3 * window + 5)
    places = torch.tensor(sorted({0, *(border + step for border in borders for step in (-1, 0, 1))}), device="cpu")
    queries, keys, first = places[:, None], places[None, :], torch.zeros((), dtype=torch.int64, device="cpu")
    expected = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
    try:
        seen = mask_function(first, first, queries, keys).expand(expected.shape)
        is_expected = seen.device.type == "cpu" and torch.equal(seen, expected)
    except (RuntimeError, IndexError, NotImplementedError):
        is_expected = False
    if not is_expected:
        raise _refusal("has a mask other than that of causal attention, with or without a window")


def _refusal(what: str) -> StartupError:
    return StartupError(f"The model's decoder {what}, which Saccade's cache does not compute; the model is not served.")


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
