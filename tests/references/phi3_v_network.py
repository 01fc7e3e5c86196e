"""Phi-3-vision's network: CLIPVisionModel and Phi3ForCausalLM of transformers, and between them what the release's
image_processing_phi3_v.py and image_embedding_phi3_v.py do, from their description; nothing of Saccade's network.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest

SIDE = 336
LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": SIDE, "patch_size": 14,
}  # fmt: skip
"""openai/clip-vit-large-patch14-336, which the release's code contains."""

VISION = "model.vision_embed_tokens."
TOWER = f"{VISION}img_processor.vision_model."


class Phi3V(nn.Module):
    """The parts of the network. Longrope has two sets of factors, *long* and short ones; one serves all lengths."""

    def __init__(self, config: Mapping[str, Any], long: bool = True) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers warns about its own deprecations
            from transformers import CLIPVisionConfig, CLIPVisionModel, Phi3Config, Phi3ForCausalLM

            rope = config["rope_scaling"]
            factors = rope["long_factor" if long else "short_factor"]
            text = {key: value for key, value in config.items() if key in Phi3Config().to_dict()}
            scaling = {"type": "longrope", "long_factor": factors, "short_factor": factors}
            # transformers asks for a pad token within the vocabulary, and knows other classes by these names.
            drop = ("architectures", "model_type", "transformers_version", "pad_token_id")
            text = {key: value for key, value in text.items() if key not in drop}
            text |= {"rope_scaling": scaling, "rope_theta": config["rope_theta"]}
            self.text = Phi3ForCausalLM(Phi3Config(**text, pad_token_id=None)).float()
            self.tower = CLIPVisionModel(CLIPVisionConfig(**{**LARGE, **config.get("vision_config", {})})).float()
        width, hidden = 4 * self.tower.config.hidden_size, config["hidden_size"]
        self.newline = nn.Parameter(torch.zeros(1, 1, 1, width))
        self.separator = nn.Parameter(torch.zeros(1, 1, width))
        self.projection = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.eval()

    def released(self) -> dict[str, torch.Tensor]:
        """Return all tensors by the names that the releases use."""
        own = {"newline": f"{VISION}sub_GN", "separator": f"{VISION}glb_GN"}
        found = {}
        for name, tensor in self.state_dict().items():
            part, _, rest = name.partition(".")
            prefix = {"text": "", "tower": TOWER, "projection": f"{VISION}img_projection."}.get(part)
            found[own[name] if prefix is None else prefix + rest] = tensor
        return found

    def load(self, path: Path) -> None:
        """Fill all parts from a checkpoint's file."""
        tensors = load_file(path)
        for name, parameter in self.released().items():
            parameter.copy_(tensors.pop(name))
        assert not tensors

    def features(self, padded: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        """Return the vectors that replace the tokens of a padded uint8 image [3, height, width]."""
        image = (padded.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        overview = nn.functional.interpolate(image[None], (SIDE, SIDE), mode="bicubic", antialias=False)[0]
        lines = [self._line(torch.stack(row.split(SIDE, 2))) for row in image.split(SIDE, 1)]
        return self.projection(
            torch.cat([self._rows(torch.cat(lines)), self.separator[0], self._rows(self._line(overview[None]))])
        )

    def _line(self, crops: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [24, 24 * crops, C] of crops that lie side by side."""
        hidden = self.tower(crops, output_hidden_states=True).hidden_states[-2][:, 1:]
        return torch.cat(list(hidden.unflatten(1, (24, 24))), 1)

    def _rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Join every 2 x 2 hidden states, and end every row with the newline."""
        corners = [hidden[top::2, left::2] for top in (0, 1) for left in (0, 1)]
        joined = torch.cat(corners, -1)
        return torch.cat([joined, self.newline[0].expand(len(joined), 1, -1)], 1).flatten(0, 1)


class Phi3VOracle:
    """The network of one checkpoint with one set of longrope's factors."""

    atol = 1e-4

    def __init__(self, folder: Path, long: bool = True) -> None:
        self.model = Phi3V(json.loads((folder / "config.json").read_text()), long)
        with torch.no_grad():
            self.model.load(folder / "model.safetensors")
        preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
        self.mean, self.std = (torch.tensor(preprocessor[key]) for key in ("image_mean", "image_std"))
        entries = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        self.placeholder_token_ids = tuple(
            int(number) for number, entry in entries.items() if entry["content"] == "<|image|>"
        )

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        """Return the logits [len(token_ids), vocab] from which each of *token_ids*, the answer, was chosen."""
        embeddings = self.model.text.model.embed_tokens(torch.tensor(asked.token_ids + token_ids[:-1]))
        for item in asked.media:
            start, length = item.spans[0].start, item.spans[0].length
            embeddings[start : start + length] = self.features(item)
        return self.model.text(inputs_embeds=embeddings[None]).logits[0, len(asked.token_ids) - 1 :].float()

    @torch.inference_mode()
    def features(self, item: MediaItem) -> torch.Tensor:
        """Return the vectors that replace the placeholders of an image."""
        pixels = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(item.pixel_shape)
        return self.model.features(pixels, self.mean, self.std)
