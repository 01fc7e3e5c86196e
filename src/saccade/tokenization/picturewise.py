"""Tokenise every stretch of text between two pictures by itself, as Phi-3-vision was trained.

Source of the rules: the release's processing_phi3_v.py, and what vLLM's models/phi3v.py makes of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from saccade.errors import InvalidValue
from saccade.tokenization.picture_tag import PictureTag
from saccade.tokenization.tokenizer import Segment, special_variables
from saccade.tokenization.tokenizer_json import JsonTokenizer


class PicturewiseTokenizer(JsonTokenizer):
    """A tokenizer.json whose BOS comes before every stretch of text, an empty one too; a picture is one token.

    *tag* is what the gateway writes for pictures, as special segments; *placeholder* is the token, by id or content,
    that a tag becomes; one that is not there becomes nothing. Raises StartupError where a file is wrong.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any],
        tag: PictureTag,
        placeholder: int | str,
    ) -> None:
        super().__init__(tokenizer_json, tokenizer_config, (placeholder,))
        token_id = self.token_id(placeholder) if isinstance(placeholder, str) else placeholder
        self._placeholder_ids = [] if token_id is None else [token_id]
        self._tag = tag
        self._named = tuple(special_variables(tokenizer_config).values())
        tokens = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join([*map(re.escape, tokens), tag.pattern.pattern])})")

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids that the release's own processor gives, each picture as one placeholder.

        Raises InvalidValue as JsonTokenizer.encode does.
        """
        token_ids: list[int] = []
        stretch: list[Segment] = []
        for segment in segments:
            if self._is_tag(segment):
                token_ids += super().encode(stretch) + self._placeholder_ids
                stretch = []
            else:
                stretch.append(segment)
        return token_ids + super().encode(stretch)

    def encode_as_vllm_chat(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids that a vLLM worker gets out of the same chat sent as messages.

        It encodes the prompt as a whole, where tags are text; drops a leading BOS; decodes, which leaves a space after
        a special token and takes away what the token swallowed; drops that space after bos_token and the like; and then
        does what `encode` does. Raises InvalidValue where a user typed a special token or a tag, which the worker would
        take for real.
        """
        given = list(segments)
        if any(self._special.search(segment.text) for segment in given if not segment.is_special):
            raise InvalidValue("The text holds a special token of this model; it cannot be sent to this worker.")
        whole = super().encode(
            Segment(segment.text, segment.is_special and not self._is_tag(segment)) for segment in given
        )
        bos = self._before if whole[: len(self._before)] == self._before else []
        text = self.decode(whole[len(bos) :])
        for token in self._named:
            text = text.replace(f"{token} ", token)
        return self.encode(self._read(text))

    def _is_tag(self, segment: Segment) -> bool:
        return segment.is_special and self._tag.pattern.fullmatch(segment.text) is not None

    def _read(self, text: str) -> Iterator[Segment]:
        """Take special tokens and tags in *text* for what they are."""
        for position, part in enumerate(self._special.split(text)):
            if part:
                yield Segment(part, is_special=position % 2 == 1)
