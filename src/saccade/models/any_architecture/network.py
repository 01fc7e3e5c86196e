"""Any image-text network of transformers' in the engine. Its own classes compute it, but for attention to the cache.

Shapes: N tokens, B bytes of pixels, U tokens of media, R rows to predict from, E hidden size, V vocabulary.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save
from safetensors.torch import load
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from saccade.errors import StartupError
from saccade.models.any_architecture.attention import NAME, Apart, Attends, ImageTrial, Step, Trial
from saccade.models.any_architecture.configuration import read_configuration
from saccade.models.any_architecture.layout import Layout
from saccade.models.any_architecture.processor import ImageProcessor, process
from saccade.models.any_architecture.spec import Spec
from saccade.models.network import Derived, Target
from saccade.models.spec import IMAGE, MediaShape
from saccade.nn.context import ForwardContext, VisionAttentionBackend
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import ALONE, Ranks

FAULTS = (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""What transformers' classes raise for what they cannot compute."""

TRIAL_TOKENS = 7
IMAGE_SHAPE = (160, 224, 3)
"""Of the image of noise with which a loaded network is checked."""

SIZES = ((224, 160), (160, 224), (20, 20), (1000, 60), (60, 1000), (2048, 1536))
"""Of images, (width, height), that must have runs of placeholders of one length if their tokens see each other."""

IMAGE_ATOL = 1e-2
"""By how much its hidden states may differ, as a part of the largest: images of several sizes are batched otherwise."""

TYPES = frozenset({"token_type_ids", "mm_token_type_ids"})
"""Inputs that tell a class which tokens are an image's: the trial with an image says what it does with them."""

LENGTH_BYTES = 8
"""Of a safetensors file, with the length of its header."""

ATTENTION = {"": "sdpa", "text_config": NAME}
"""The decoder's attention goes to the cache, and the tower's to PyTorch."""


class Finished:
    """The output of a body that has already run: the top of the network gets its hidden states from it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class Body(nn.Module):
    """A network without its head; *finished* says that its input is its output, which goes on to the head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class that computes the body."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, finished: bool = False, **options: Any) -> Any:
        """Return the body's output."""
        return Finished(options["inputs_embeds"]) if finished else self.inner(*args, **options)


class Network(nn.Module):
    """Implements models.network.Network. Its parameters have no storage before `load_weights`."""

    is_tied = False

    def __init__(
        self, spec: Spec, config: Mapping[str, Any], preprocessor: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        if ranks.size > 1:
            raise StartupError("--model-impl transformers serves a model on one rank; leave out the parallel sizes.")
        self.spec = spec
        self._files = config, preprocessor
        self._configuration = read_configuration(config)
        try:
            with _quiet():
                top = AutoModelForImageTextToText.from_config(self._configuration, attn_implementation=ATTENTION)
        except FAULTS as error:
            raise StartupError(
                f"transformers makes no network for images and text of the model_type {config.get('model_type')!r}, or "
                "not with this config.json and the installed packages; it is not served."
            ) from error
        self.top = _with_body(top)
        _check_class(self.top)
        self._scorings = self._try()

    def _try(self) -> Mapping[int, Any]:
        """Return how each layer attends. Raises StartupError if the engine's cache cannot compute it."""
        trial = Trial()
        # Experts are known to the meta device in this dtype only.
        self.top.to(torch.bfloat16)
        x_NE = torch.empty(TRIAL_TOKENS, self.spec.text.hidden_size, dtype=torch.bfloat16)
        try:
            self._hidden(x_NE, torch.arange(TRIAL_TOKENS), trial)
            self.logits(x_NE)
        except FAULTS as error:
            raise StartupError(
                f"{type(self.top).__name__} needs more than embeddings and positions to compute a token, which is "
                "not served."
            ) from error
        own = tuple(trial.kv_specs.get(layer) for layer in range(len(self.spec.kv_specs)))
        if own != self.spec.kv_specs or len(trial.kv_specs) != len(own):
            raise StartupError(
                f"{type(self.top).__name__} has layers without attention to a cache of keys and values, or other ones "
                "than config.json says; it is not served."
            )
        return trial.scorings

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype  # type: ignore[no-any-return]

    @property
    def _embedding(self) -> Any:
        return self.top.get_input_embeddings()

    def load_weights(self, folder: Path, device: torch.device) -> int:
        """Fill the parameters by transformers' own loader, from safetensors alone; return the number of their values.

        Raises StartupError.
        """
        logging.disable_progress_bar()
        with _quiet():
            top, info = AutoModelForImageTextToText.from_pretrained(
                folder,
                config=self._configuration,
                attn_implementation=ATTENTION,
                dtype=self.dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if faults := sorted(map(str, info.get(kind) or ())):
                raise StartupError(f"The checkpoint's weights: {kind.replace('_', ' ')}: {', '.join(faults[:5])}.")
        self.top = _with_body(top.to(device)).eval()
        self._check_image()
        return sum(parameter.numel() for parameter in self.top.parameters())

    @torch.inference_mode()
    def _check_image(self) -> None:
        """Find out which layers let an image's tokens see each other, and what of an image is more than its features.

        The class computes a prompt with an image as a whole, and then from its embeddings and features alone. Raises
        StartupError if its masks are others than the cache's, or if the results differ.
        """
        layout = Layout(*self._files)
        noise = np.random.default_rng(0).integers(0, 256, IMAGE_SHAPE, dtype=np.uint8)
        prompt, arrays = process(layout.settings, Image.fromarray(noise), ImageProcessor)
        ids, runs = self._ids("", *prompt, "", added=layout.settings["added_tokens"])
        rows, content = (runs >= 0).nonzero().flatten(), save(arrays)
        types = {name: (runs >= 0).long().unsqueeze(0) for name in _types(self.top.model.inner)}
        positions, trial = torch.arange(len(ids), device=self.device), ImageTrial(dict(self._scorings), runs)
        try:
            features = self._features(torch.frombuffer(bytearray(content), dtype=torch.uint8), len(rows))
            whole = self._body({"input_ids": ids.unsqueeze(0), **self._tensors(content), **types}, positions, trial)
        except FAULTS as error:
            raise StartupError(
                f"{type(self.top).__name__} does not take what its processor makes of an image."
            ) from error
        self._scorings = trial.scorings
        in_parts = self._hidden(self.embed(ids, rows, features), positions, Apart(self._scorings, runs))
        if not torch.allclose(whole, in_parts, atol=IMAGE_ATOL * whole.abs().max().item(), rtol=0):
            raise StartupError(
                f"{type(self.top).__name__} does more with an image than to put its features into the prompt, which is "
                "not served."
            )
        if any(scoring.looks_ahead for scoring in self._scorings.values()):
            self.spec = replace(self.spec, whole_run=self._whole_run(layout))

    def _ids(self, *prompt: str | int, added: Mapping[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 [N] of *prompt*, which is as in ImageLayout, and runs int64 [N], as Apart has them."""
        placeholder = self.spec.placeholder_of[IMAGE]
        ids, runs = list[int](), list[int]()
        for number, piece in enumerate(prompt):
            is_run = isinstance(piece, int)
            ids += [placeholder] * piece if isinstance(piece, int) else [added.get(piece, 0)]
            runs += [number if is_run else -1] * (len(ids) - len(runs))
        return torch.tensor(ids, device=self.device), torch.tensor(runs, device=self.device)

    def _whole_run(self, layout: Layout) -> int:
        """Return the length of every run of placeholders, whatever the image. Raises StartupError if they differ."""
        prompts = [layout.image(*size, layout.settings).prompt for size in SIZES]
        lengths = {piece for prompt in prompts for piece in prompt if isinstance(piece, int)}
        if len(lengths) > 1 or any(isinstance(prompt[0], int) and isinstance(prompt[-1], int) for prompt in prompts):
            raise StartupError(
                f"{type(self.top).__name__} lets an image's tokens see each other, and has images of different lengths "
                "or without text around them; it is not served."
            )
        return lengths.pop()

    def untie(self) -> None:
        """Do nothing: transformers' loader decides about the head."""

    def make_tied_head(self) -> None:
        """Do nothing: transformers' loader ties the head."""

    def share_head(self) -> None:
        """Do nothing: the head is not packed."""

    def is_head(self, name: str) -> bool:
        """Return False: tensors are not placed by name."""
        return False

    def locate(self, name: str) -> Target | Derived | None:
        """Return None: tensors are not placed by name."""
        return None

    def finish(self) -> None:
        """Do nothing: the loaded network is whole."""

    def prepare(self, items: Sequence[MediaShape], backend: VisionAttentionBackend) -> list[MediaShape]:
        """Return *items*: each is encoded alone, so that its features depend on no other."""
        return list(items)

    def encode(self, pixels_B: torch.Tensor, metadata: list[MediaShape]) -> Layerwise:
        """Map the tensors of each image to features [U, E]. Raises ValueError for other features than its tokens."""
        sizes = [item.grid[2] for item in metadata]
        tensors = pixels_B.cpu().split(sizes)
        features = [self._features(one, item.grid[1]) for one, item in zip(tensors, metadata, strict=True)]
        yield
        return torch.cat(features)

    def _features(self, pixels_B: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if not pixels_B[:LENGTH_BYTES].any():
            # The image of a warm-up has no tensors.
            return torch.zeros(num_tokens, self.spec.feature_width, dtype=self.dtype, device=self.device)
        output = self.top.get_image_features(**self._tensors(pixels_B.numpy().tobytes()))
        parts = output.pooler_output
        features = (torch.cat(list(parts)) if not torch.is_tensor(parts) else parts).flatten(0, -2)
        if features.shape != (num_tokens, self.spec.feature_width):
            raise ValueError(f"An image of {num_tokens} tokens has features of shape {[*features.shape]}.")
        return features.to(self.dtype)

    def _tensors(self, content: bytes) -> dict[str, torch.Tensor]:
        """Return the tensors of an image for the network."""
        return {
            name: values.to(self.device, self.dtype if values.is_floating_point() else values.dtype)
            for name, values in load(content).items()
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW replaces the embeddings at *media_rows* int64 [U]."""
        x_NE = self.embed(input_ids, media_rows, media_UW)
        return self._hidden(x_NE, context.positions[0], Step(context, self._scorings))

    def _hidden(self, x_NE: torch.Tensor, positions_N: torch.Tensor, paged: Attends) -> torch.Tensor:
        return self._body({"inputs_embeds": x_NE.unsqueeze(0)}, positions_N, paged)

    def _body(self, inputs: Mapping[str, torch.Tensor], positions_N: torch.Tensor, paged: Attends) -> torch.Tensor:
        # Without a mask, transformers would look for several sequences in the positions.
        visible = torch.ones(1, len(positions_N), dtype=torch.bool, device=positions_N.device)
        output = self.top.model(
            **inputs,
            attention_mask=visible,
            position_ids=positions_N.unsqueeze(0),
            use_cache=False,
            paged=paged,
        )
        return output[0].squeeze(0)  # type: ignore[no-any-return]

    def embed(
        self, input_ids: torch.Tensor, media_rows: torch.Tensor | None = None, media_UW: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the decoder's input [N, E] for the same arguments as `forward`."""
        x_NE: torch.Tensor = self._embedding(input_ids)
        if media_rows is not None and media_UW is not None:
            x_NE = x_NE.index_copy(0, media_rows, media_UW)
        return x_NE

    def draft(
        self, x_NE: torch.Tensor, hidden_NE: torch.Tensor, context: ForwardContext, *, attends: bool = True
    ) -> torch.Tensor:
        """Raise NotImplementedError: no spec of the family has `drafts` set."""
        raise NotImplementedError

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32, by the class's own head with its scales and caps."""
        output = self.top(inputs_embeds=hidden_RE.unsqueeze(0), use_cache=False, finished=True)
        return output.logits.squeeze(0).float()  # type: ignore[no-any-return]


def _with_body(top: Any) -> Any:
    if not isinstance(getattr(top, "model", None), nn.Module):
        raise StartupError(f"{type(top).__name__} does not separate its head from its body; it is not served.")
    top.model = Body(top.model)
    return top


def _check_class(top: Any) -> None:
    """Raise StartupError if the network needs other inputs than embeddings, or has no features of images."""
    name = type(top).__name__
    if types := [parameter for parameter in _types(top.model.inner) if parameter not in TYPES]:
        raise StartupError(f"{name} needs {', '.join(types)} for each token, which is not served.")
    if hasattr(top.model, "get_rope_index"):
        raise StartupError(f"{name} has positions on several axes, which are not served for any architecture.")
    if not hasattr(top, "get_image_features"):
        raise StartupError(f"{name} has no features of images that stand for tokens; it is not served.")


def _types(body: nn.Module) -> list[str]:
    """Return the parameters of *body* that take a type of each token."""
    return [name for name in inspect.signature(type(body).forward).parameters if "type_id" in name]


def _quiet() -> warnings.catch_warnings:
    """Keep transformers' warnings of its own deprecations from the log."""
    return warnings.catch_warnings(action="ignore")
