"""Answers through HTTP, compared with transformers' processor and network."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from chats import Part, openai_messages, random_image, reference_messages
from PIL import Image
from references.networks import image_text_model
from server import Server, serving

MAX_TOKENS = 12
CHATS: tuple[tuple[Part, ...], ...] = (
    ("What is it?",),
    (random_image(300, 60, 1), "Describe the image."),
    ("First:", random_image(64, 96, 2), "second: ", random_image(40, 300, 3), "Compare the two images."),
)

Process = Callable[[list[Any], list[Image.Image]], Mapping[str, Any]]
"""Returns what `generate` takes for messages and their images."""


@torch.inference_mode()
def check_answers(folder: Path, process: Process, switch: str | None = None) -> None:
    """Check that the answers to CHATS are the reference's, and JSON if asked for; *switch* is that of reasoning."""
    model, body = image_text_model(folder), {} if switch is None else {"chat_template_kwargs": {switch: False}}
    with serving(str(folder), "--max-model-len", "2048") as server:
        for parts in CHATS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers warns about its own deprecations
                inputs = process(*reference_messages(*parts))
            check_answer(server, model, inputs, openai_messages(*parts), **body)
        check_json(server, switch)


def check_answer(server: Server, model: Any, inputs: Mapping[str, Any], messages: list[Any], **body: Any) -> None:
    """Check that prompt, usage and answer to *messages* are those of *model* for *inputs*; the request has *body*."""
    output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
    length = inputs["input_ids"].shape[1]
    answer: Any = server.client().chat.completions.create(
        model=server.name,
        messages=messages,
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, **body},
    )
    assert answer.prompt_token_ids == output[:length]
    assert answer.usage.prompt_tokens == length
    assert answer.choices[0].token_ids == output[length:]


def check_json(server: Server, switch: str | None = None) -> None:
    """Check that content is the JSON that was asked for, also with reasoning, which *switch* turns on and off."""
    schema = {"enum": ["left", "right"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "side", "schema": schema, "strict": True}}
    bodies: list[dict[str, Any]] = [{}]
    if switch is not None:
        bodies = [
            {"chat_template_kwargs": {switch: False}},
            {"chat_template_kwargs": {switch: True}, "thinking_token_budget": 4},
        ]
    for body in bodies:
        (choice,) = (
            server.client()
            .chat.completions.create(
                model=server.name,
                messages=openai_messages(random_image(64, 64, 5), "Which side?"),
                response_format=form,
                max_tokens=60,
                seed=1,
                extra_body=body,
            )
            .choices
        )
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "") in schema["enum"]


def processed(processor: Any, prompt: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return what *processor* makes of *prompt*, without what only networks with M-RoPE take."""
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    return {key: value for key, value in inputs.items() if key != "mm_token_type_ids"}
