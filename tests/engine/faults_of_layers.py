"""Layers that give NaN or infinity for a token, as an overflow or a bad kernel does. Everything else computes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import engines
import pytest
import torch

from saccade.engine.loop import Engine


class LayerFault:
    """Layer *place* of the network gives *value* in one channel for the token *token_id*, while `happening`.

    The head is a layer of rows, not of tokens: it does so for the rows of the last hidden state of that token. Places
    below `visual` do so for all patches.
    """

    def __init__(self, engine: Engine, place: str, value: float, token_id: int) -> None:
        self._network: torch.nn.Module = engines.module(engine)
        self._layer: Any = self._network.get_submodule(place)
        self.place, self.value, self._token_id = place, value, token_id
        self._marked_N = torch.empty(0, dtype=torch.bool)
        self._marked_states_RE = torch.empty(0)
        self.num_hits = 0

    @contextmanager
    def happening(self) -> Iterator[None]:
        """Let the layer fail in this block."""
        handles = [
            self._network.register_forward_pre_hook(self._mark),
            self._network.register_forward_hook(self._keep),
            self._layer.register_forward_hook(self._spoil),
        ]
        with pytest.MonkeyPatch.context() as patch:
            if self.place.endswith("experts"):  # which are not called as a layer
                summand = self._layer.summand
                patch.setattr(self._layer, "summand", lambda *x: self._spoil(self._layer, x, summand(*x)))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
        assert self.num_hits, self.place

    def _mark(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self._marked_N = arguments[0] == self._token_id

    def _keep(self, _: Any, __: Any, hidden: torch.Tensor) -> None:
        self._marked_states_RE = hidden[self._marked_N]

    def _spoil(self, _: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        rows = self._rows(arguments[0], output)
        if rows is None or not rows.any():
            return output
        self.num_hits += 1
        output = output.clone()
        output[rows, ..., 1] = self.value
        return output

    def _rows(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        if self.place.startswith("visual"):
            return torch.ones(len(output), dtype=torch.bool)
        if self.place == "lm_head":
            return (x.unsqueeze(1) == self._marked_states_RE).all(-1).any(1)
        return self._marked_N if len(self._marked_N) == len(output) else None
