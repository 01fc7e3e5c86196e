"""Tokenises every stretch of text between two images separately, as in Phi-3-vision's training.

Source of the rules: the release's processing_phi3_v.py; for chats that vLLM serves, _apply_prompt_updates in
model_executor/models/phi3v.py of vLLM 0.32.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import tokenizers

from saccade.tokenization.added_tokens import merge_special_tokens
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.tokenizer import Pieces, Segment, check_length, special_variables
from saccade.tokenization.tokenizer_json import JsonTokenizer


class ImagewiseTokenizer(JsonTokenizer):
    """Reads a tokenizer.json, and puts a BOS before every stretch of text, even an empty one. Each image is one token.

    The gateway writes *tag* for images, as special segments. A tag becomes the token *placeholder*, an id or content,
    or no token if the vocabulary lacks it. Raises StartupError if a file is wrong.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any],
        tag: ImageTag,
        placeholder: int | str,
    ) -> None:
        super().__init__(tokenizer_json, tokenizer_config, (placeholder,))
        token_id = self.token_id(placeholder) if isinstance(placeholder, str) else placeholder
        self._placeholder_ids = [] if token_id is None else [token_id]
        self._tag = tag
        self._file = tokenizer_json
        self._config = tokenizer_config

    def encode(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Return the ids that the release's own processor gives, with each image as one placeholder.

        Raises InvalidValue as JsonTokenizer.encode does.
        """
        token_ids: list[int] = []
        stretch: list[Segment] = []
        for segment in segments:
            if self._is_tag(segment):
                token_ids += super().encode(stretch, pieces) + self._placeholder_ids
                stretch = []
            else:
                stretch.append(segment)
        return token_ids + super().encode(stretch, pieces)

    def encode_as_vllm_chat(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Return vLLM's ids for a chat with images, with each image as one placeholder.

        vLLM encodes the whole prompt and decodes it again, which loses white space next to special tokens. Only then
        does it encode the text between images. Without images it adds no BOS. It treats special tokens in users' text
        as the template's, so such text must not be sent to it. Raises InvalidValue for more than MAX_TEXT_BYTES.
        """
        text = "".join(segment.text for segment in segments)
        check_length(text)
        whole = self._ids(text)
        if not self._tag.pattern.search(text):
            return whole
        if self._before and whole[:1] == self._before[:1]:
            whole = whole[1:]
        text = self._plain.decode(whole, skip_special_tokens=False)
        for token in self._named_tokens:
            text = text.replace(f"{token} ", token)
        first, *others = (self._before + self._ids(stretch) for stretch in self._tag.pattern.split(text))
        return first + [token_id for stretch in others for token_id in (*self._placeholder_ids, *stretch)]

    def _ids(self, text: str) -> list[int]:
        """Return the ids of *text*. Strings that look like special tokens become special tokens."""
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer as the reference loads it."""
        plain = tokenizers.Tokenizer.from_str(self._file.decode())
        merge_special_tokens(plain, self._config)
        return plain

    @cached_property
    def _named_tokens(self) -> list[str]:
        """The reference's `all_special_tokens`: those that tokenizer_config.json names."""
        named = list(special_variables(self._config).values())
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = self._config.get(key)
            for token in listed if isinstance(listed, list) else ():
                named.append(token["content"] if isinstance(token, dict) else token)
        return [token for token in dict.fromkeys(named) if isinstance(token, str) and token]

    def _is_tag(self, segment: Segment) -> bool:
        return segment.is_special and self._tag.pattern.fullmatch(segment.text) is not None
