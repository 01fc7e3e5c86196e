"""Kimi-K3: the release's processor (media_utils.py, kimi_k3_vision_processing.py) and the program that writes its
prompts (encoding_k3.py), from their description: Pillow, numpy, tiktoken; nothing of Saccade.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from checkpoints.kimi_k3 import NUM_RESERVED
from checkpoints.kimi_k25 import PATTERN
from PIL import Image
from tiktoken.load import load_tiktoken_bpe

from references import Chat, Seen

PLACEHOLDER = "<|media_pad|>"
LONGEST_TEXT = 400_000
KINDS = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object"}
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
    "`thinking_effort={}`."
)


class KimiK3:
    """The reference for one checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        self.media = json.loads((folder / "preprocessor_config.json").read_text())["media_proc_cfg"]
        ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
        entries = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        names = {int(number): entry["content"] for number, entry in entries.items()}
        reserved = range(len(ranks), len(ranks) + NUM_RESERVED)
        special = {names.get(number, f"<|reserved_token_{number}|>"): number for number in reserved}
        self.encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def see(self, image: Image.Image) -> Seen:
        patch, merge = self.media["patch_size"], self.media["merge_kernel_size"]
        longest = self.media["patch_limit_on_one_side"] * patch
        patches = max(1, image.width // patch) * max(1, image.height // patch)
        scale = min(
            1.0, math.sqrt(self.media["in_patch_limit"] / patches), longest / image.width, longest / image.height
        )
        size = [min(max(1, int(side * scale)), longest) for side in image.size]
        if image.mode == "P":  # Pillow resizes palettes without a filter; Saccade resizes their colours
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        small = self._opaque(_resized(image, size))
        width, height = (-(-side // (patch * merge)) * patch * merge for side in small.size)
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[: small.height, : small.width] = np.asarray(small)
        cut = canvas.reshape(height // patch, patch, width // patch, patch, 3)
        pixels = np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(-1, 3, patch, patch)
        values = (pixels / 255.0).astype(np.float32)
        values -= np.array(self.media["image_mean"])[:, None, None]
        values *= 1.0 / np.array(self.media["image_std"])[:, None, None]
        num_tokens = (height // (patch * merge)) * (width // (patch * merge))
        text = f"<|media_begin|>image {image.width}x{image.height}<|media_content|>{PLACEHOLDER * num_tokens}"
        grid = (1, height // patch, width // patch)
        return Seen(num_tokens, torch.from_numpy(values), grid, pixels, f"{text}<|media_end|>")

    def _opaque(self, image: Image.Image) -> Image.Image:
        if "A" not in image.getbands() and "transparency" not in image.info:
            return image.convert("RGB")
        rgba = np.array(image.convert("RGBA"))
        board = self.media["transparent_bg_config"]
        square, shade = board["chessboard_square_size"], board["chessboard_gray_value"]
        behind = np.full((*rgba.shape[:2], 3), board["chessboard_white_value"], np.uint8)
        for y in range(0, image.height, square):
            for x in range(0, image.width, square):
                if (y // square + x // square) % 2 == (1 if board["chessboard_square_on_top_left"] else 0):
                    behind[y : y + square, x : x + square] = shade
        alpha = np.stack([rgba[:, :, 3].astype(np.float32) / 255.0] * 3, axis=2)
        return Image.fromarray((alpha * rgba[:, :, :3] + (1 - alpha) * behind).astype(np.uint8))

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        thinks, effort = switches.get("thinking", True), switches.get("thinking_effort", "max")
        prompt = ""
        if switches.get("tools"):
            declared = json.dumps(switches["tools"], ensure_ascii=False, separators=(",", ":"), sort_keys=True)
            prompt += _message(
                "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
                f"```json\n{declared}\n```", role="system", type="tool-declare",
            )  # fmt: skip
        if thinks:
            prompt += _message(EFFORT.format(effort), role="system", type="thinking-effort")
        asked: list[dict[str, Any]] = []
        answered = 0
        for position, message in enumerate(chat):
            if switches.get("continue_final_message") and position == len(chat) - 1:
                inside = _assistant(message, thinks).split("<|open|>response<|sep|>")[0]
                return f'{prompt}<|open|>message role="assistant"<|sep|>{inside}<|open|>response<|sep|>' + _content(
                    message["content"]
                )
            named = {"name": message["name"]} if message.get("name") else {}
            if message["role"] == "tool":
                answered += 1
                prompt += _message(
                    _content(message["content"]), role="tool", tool=asked[answered - 1]["function"]["name"],
                    index=answered,
                )  # fmt: skip
            elif message["role"] == "assistant":
                asked, answered = message.get("tool_calls") or [], 0
                prompt += _message(_assistant(message, thinks), role="assistant", **named)
            else:
                prompt += _message(_content(message["content"]), role=message["role"], **named)
        if add_generation_prompt:
            prompt += _open("message", role="assistant") + _open("think" if thinks else "response")
        return prompt

    def token_ids(self, prompt: str, seen: Sequence[Seen]) -> list[int]:
        pieces = prompt.split(PLACEHOLDER)
        shown = (one.text or "" for one in seen)
        text = pieces[0] + "".join(image + piece for image, piece in zip(shown, pieces[1:], strict=True))
        return self.encoding.encode(text, allowed_special="all")


def _resized(image: Image.Image, size: Sequence[int]) -> Image.Image:
    """The horizontal pass first; Pillow weights the colours of RGBA and LA by alpha for both passes together."""
    if image.size == tuple(size):
        return image
    weighted = {"RGBA": "RGBa", "LA": "La"}.get(image.mode, image.mode)
    across = image.convert(weighted).resize((size[0], image.height), Image.Resampling.BICUBIC)
    return across.resize((size[0], size[1]), Image.Resampling.BICUBIC).convert(image.mode)


def _open(tag: str, **attributes: Any) -> str:
    escaped = {key: str(value).replace("&", "&amp;").replace('"', "&quot;") for key, value in attributes.items()}
    written = "".join(f' {key}="{value}"' for key, value in escaped.items())
    return f"<|open|>{tag}{written}<|sep|>"


def _close(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def _message(inside: str, **attributes: Any) -> str:
    return f"{_open('message', **attributes)}{inside}{_close('message')}<|end_of_msg|>"


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(PLACEHOLDER if part["type"] == "image" else part["text"] for part in content)


def _assistant(message: Mapping[str, Any], thinks: bool) -> str:
    reasoning = message.get("reasoning_content") or ""
    inside = f"{_open('think')}{reasoning if reasoning.strip() else ''}{_close('think')}" if thinks else ""
    inside += f"{_open('response')}{_content(message['content'])}{_close('response')}"
    calls = message.get("tool_calls") or []
    if not calls:
        return inside
    inside += _open("tools")
    for number, call in enumerate(calls, start=1):
        inside += _open("call", tool=call["function"]["name"], index=number)
        for key, value in call["function"]["arguments"].items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            inside += f"{_open('argument', key=key, type=KINDS.get(type(value), 'array'))}{written}{_close('argument')}"
        inside += _close("call")
    return inside + _close("tools")
