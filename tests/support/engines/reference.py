"""The independent reference: transformers' own processor and model, in float32, one prompt at a time."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision_schemas import import_torchvision


@dataclass(frozen=True)
class Completion:
    """Greedy ids (the end-of-sequence id included), float32 logits [num_ids, vocab] they were chosen from, and the text."""

    token_ids: list[int]
    logits: torch.Tensor
    text: str


class Reference:
    """transformers on one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        import_torchvision()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            self.model: Any = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
            template = folder / "chat_template.json"
            if template.exists():  # the releases keep it there for the processor; a tokenizer alone does not look
                self.tokenizer.chat_template = json.loads(template.read_text())["chat_template"]
            self.image_processor: Any = transformers.AutoImageProcessor.from_pretrained(folder)
        self.model.eval()

    @cached_property
    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return {ends} if isinstance(ends, int) else set(ends)

    def inputs(self, messages: list[dict[str, Any]], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a chat whose image parts are {"type": "image"}, in the images' order."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token = self.tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)
        inputs: dict[str, torch.Tensor] = {}
        if images:
            processed = self.image_processor(images=list(images), return_tensors="pt")
            inputs = {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"]}
            pieces = text.split(token)
            counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
            text = pieces[0] + "".join(token * count + piece for count, piece in zip(counts, pieces[1:], strict=True))
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        return {**inputs, "input_ids": ids, "mm_token_type_ids": (ids == self.model.config.image_token_id).long()}

    @torch.inference_mode()
    def generate(self, messages: list[dict[str, Any]], images: Sequence[Image.Image], num_tokens: int) -> None:
        """Generate exactly *num_tokens* greedy tokens; for measuring."""
        self.model.model.rope_deltas = None
        inputs = self.inputs(messages, images)
        mask = torch.ones_like(inputs["input_ids"])
        self.model.generate(
            **inputs, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )

    @torch.inference_mode()
    def complete(
        self, messages: list[dict[str, Any]], images: Sequence[Image.Image] = (), max_tokens: int = 16
    ) -> Completion:
        """Return the greedy completion of a chat."""
        self.model.model.rope_deltas = None
        inputs = self.inputs(messages, images)
        output = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        shown = token_ids[:-1] if token_ids and token_ids[-1] in self._end_ids else token_ids
        logits = torch.cat(output.logits).float()
        return Completion(token_ids, logits, self.tokenizer.decode(shown, skip_special_tokens=True))
