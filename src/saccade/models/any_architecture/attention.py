"""The attention of transformers' decoders in the engine's paged cache, and the trials that say what it must compute.

transformers asks two registries: one for the function that attends, one for the function that makes masks. It gives a
function without a mask function no mask, and says nothing. So both are registered here, and a mask has no values, only
the rule that says which tokens see each other. Before any weights are loaded, a trial runs a decoder on the meta
device. After that, another one runs a prompt with an image. Whatever they ask for that the cache does not compute is
refused by name.

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

UNUSED = frozenset({"dropout", "is_causal", "use_cache", "position_ids", "output_attentions", "output_hidden_states"})
"""Options of an attention function that change nothing here; `is_causal` is checked on the layer."""

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a row and a head, queries and keys by number: whether the query sees the key."""


class Mask(torch.Tensor):
    """A mask without values: its *rule*, and the *window* of the layers that get it."""

    rule: Rule | None = None
    window: int | None = None


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

    def seen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return whether *queries* see *keys*, both by number, by the rule of the mask; None if it has none."""
        rule: Rule | None = getattr(self.mask, "rule", None)
        if rule is None:
            return None
        first = torch.zeros((), dtype=torch.int64, device=queries.device)
        return rule(first, first, queries.unsqueeze(1), keys.unsqueeze(0)).expand(len(queries), len(keys))


class Step(NamedTuple):
    """A step of the engine; *scorings* are those of the trials, by layer."""

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
    """Attention within one sequence, without a cache: two passes over the same sequence can be compared.

    *runs_N* int64 are the numbers of the runs of placeholders that tokens belong to, and -1 for text.
    """

    scorings: Mapping[int, Scoring]
    runs_N: torch.Tensor

    def attend(
        self, layer: Any, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Attend as the cache would for *layer*."""
        scoring = self.scorings[layer.layer_idx]
        q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in (q_NQD, k_NKD, v_NKW))
        visible = _visible_within(self.runs_N, scoring)
        output = functional.scaled_dot_product_attention(q, k, v, visible, scale=scoring.scale, enable_gqa=True)
        return output.squeeze(0).transpose(0, 1).flatten(1)


@dataclass
class ImageTrial:
    """The same within a prompt with an image, by the class's own masks, which complete *scorings*.

    Raises StartupError for a mask that the cache does not compute.
    """

    scorings: dict[int, Scoring]
    runs_N: torch.Tensor

    def attend(
        self, layer: Any, q_NQD: torch.Tensor, k_NKD: torch.Tensor, v_NKW: torch.Tensor, call: Call
    ) -> torch.Tensor:
        """Note whether the image's tokens see each other in *layer*, and attend."""
        places = torch.arange(len(self.runs_N), device=self.runs_N.device)
        seen, number = call.seen(places, places), layer.layer_idx
        either = (self.scorings[number]._replace(looks_ahead=ahead) for ahead in (False, True))
        own = next(
            (one for one in either if seen is not None and torch.equal(seen, _visible_within(self.runs_N, one))), None
        )
        if own is None:
            raise _refusal(
                "lets tokens of a prompt with an image see others than earlier ones and those of their image"
            )
        self.scorings[number] = own
        return Apart(self.scorings, self.runs_N).attend(layer, q_NQD, k_NKD, v_NKW, call)


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
        if not isinstance(call.mask, Mask) or call.mask.rule is None:
            raise _refusal("makes the mask of its attention itself")
        if not getattr(layer, "is_causal", True) or call.options.get("is_causal") is False:
            raise _refusal("lets tokens attend to later ones")
        if unknown := sorted(name for name, value in call.options.items() if name not in UNUSED and value is not None):
            raise _refusal(f"has attention with {', '.join(unknown)}")
        window = call.mask.window
        if call.window not in (None, window):
            raise _refusal(f"has a layer with a window of {call.window} and a mask of {window}")
        if not _is_causal(call, window):
            raise _refusal("has a mask other than that of causal attention, with or without a window")
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


def mask(*, mask_function: Rule, local_size: int | None = None, **_: Any) -> torch.Tensor:
    """Implement transformers' mask function: return a Mask with four axes."""
    result = torch.empty((1, 1, 1, 0), dtype=torch.bool, device="meta").as_subclass(Mask)
    result.rule, result.window = mask_function, local_size
    return result


def _visible_within(runs_N: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return whether tokens of a sequence see each other [N, N] in a layer with *scoring*, as in the engine."""
    places_N = torch.arange(len(runs_N), device=runs_N.device)
    return _visible(places_N, scoring.window, runs_N if scoring.looks_ahead else None)


def _visible(places_N: torch.Tensor, window: int | None, runs_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return whether tokens at *places_N* see each other [N, N]: earlier ones and those of their run, in a window."""
    visible = places_N <= places_N.unsqueeze(1)
    if runs_N is not None:
        visible |= (runs_N == runs_N.unsqueeze(1)) & (runs_N >= 0)
    return visible if window is None else visible & (places_N > places_N.unsqueeze(1) - window)


def _is_causal(call: Call, window: int | None) -> bool:
    """Return whether tokens see themselves and earlier ones, within *window* if there is one.

    The places that are compared lie around the borders of a window.
    """
    borders = (1, 2, 3, 7, 64, 4099) if window is None else (1, 2, window, 2 * window, 3 * window + 5)
    places = torch.tensor(sorted({0, *(border + step for border in borders for step in (-1, 0, 1))}), device="cpu")
    try:
        seen = call.seen(places, places)
        return seen is not None and seen.device.type == "cpu" and torch.equal(seen, _visible(places, window))
    except (RuntimeError, IndexError, NotImplementedError):
        return False


def _refusal(what: str) -> StartupError:
    return StartupError(f"The model's decoder {what}, which Saccade's cache does not compute; the model is not served.")


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)
