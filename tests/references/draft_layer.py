"""The draft layer of Qwen3.5 by the published formula, on whole sequences, with transformers' layers.

transformers leaves the layer out. Formula: vLLM, qwen3_5_mtp.py: the layer gets, for each token but the first, the norm
of its embedding and the norm of the decoder's result for the token before it, joined by `fc`, at
the position of the token before it; its result predicts the token behind it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

from references.networks import RecurrentOracle
from saccade.protocol.request import EngineRequest


class DraftOracle(RecurrentOracle):
    """The logits of what a checkpoint's draft layer predicts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        decoder: Any = self.model.model.language_model
        config, kind = decoder.config, type(decoder.layers[0])
        index = next(index for index, layer in enumerate(config.layer_types) if layer == "full_attention")
        stored = load_file(folder / "model.safetensors")
        self._weights = {key.removeprefix("mtp."): value for key, value in stored.items() if key.startswith("mtp.")}
        self._layer = kind(config, index).float().eval()
        prefix = "layers.0."
        own = {key.removeprefix(prefix): value for key, value in self._weights.items() if key.startswith(prefix)}
        self._layer.load_state_dict(own)
        self._rotary = decoder.rotary_emb
        self._seen: list[torch.Tensor] = []
        self._rotary.register_forward_pre_hook(lambda _, given: self._seen.extend(given))
        decoder.norm.register_forward_hook(lambda *given: self._seen.append(given[2]))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self._weights[f"{name}.weight"], self.model.model.language_model.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight)

    @torch.inference_mode()
    def drafts(self, asked: EngineRequest, token_ids: list[int], drafts: Mapping[int, tuple[int, ...]]) -> torch.Tensor:
        """Return logits [D, vocab], one for each draft after the first n tokens of the answer, by n and in order.

        A draft is an input of those after it, with the layer's own result in place of a hidden state.
        """
        self._seen.clear()
        longest = max(map(len, drafts.values()))
        self.logits(asked, [*token_ids, *[0] * longest])
        x, positions, hidden = self._seen
        joined = self._join(x[:, 1:], hidden[:, :-1])
        logits = []
        for num_tokens, drafted in drafts.items():
            entries = joined[:, : len(asked.token_ids) + num_tokens - 1]
            for draft in drafted:
                length = entries.shape[1]
                mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
                angles = self._rotary(entries, positions[..., :length])
                state = self._norm("norm", self._layer(entries, angles, attention_mask=mask)[:, -1:])
                logits.append(self.model.lm_head(state)[0, 0])
                embedded = self.model.get_input_embeddings()(torch.tensor([[draft]]))
                entries = torch.cat((entries, self._join(embedded, state)), 1)
        return torch.stack(logits)

    def _join(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._norm("pre_fc_norm_embedding", x), self._norm("pre_fc_norm_hidden", hidden)
        return functional.linear(torch.cat(normed, -1), self._weights["fc.weight"])
