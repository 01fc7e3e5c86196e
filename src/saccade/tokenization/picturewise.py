"""Tokenise every stretch of text between two pictures separately, as Phi-3-vision was trained.

Source of the rules: the release's processing_phi3_v.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from saccade.tokenization.picture_tag import PictureTag
from saccade.tokenization.tokenizer import Segment
from saccade.tokenization.tokenizer_json import JsonTokenizer


class PicturewiseTokenizer(JsonTokenizer):
    """A tokenizer.json whose BOS precedes every stretch of text, also an empty one; a picture is one token.

    The gateway writes *tag* for pictures, as special segments. A tag becomes the token *placeholder*, an id or content,
    or no token if the vocabulary lacks it. Raises StartupError if a file is wrong.
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

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids of the release's own processor, each picture as one placeholder.

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

    def _is_tag(self, segment: Segment) -> bool:
        return segment.is_special and self._tag.pattern.fullmatch(segment.text) is not None
