"""Loads a checkpoint's tokenizer from its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import StartupError
from saccade.protocol.model_files import TIKTOKEN, TOKENIZER
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.imagewise import ImagewiseTokenizer
from saccade.tokenization.tiktoken_model import TiktokenTokenizer
from saccade.tokenization.tokenizer import Tokenizer
from saccade.tokenization.tokenizer_json import JsonTokenizer


@dataclass(frozen=True)
class TokenizerNeeds:
    """What a family requires of its tokenizer.

    - placeholder_token_id, placeholder: the token for images, by its id, or by its text if the id is None. It is
          special even if the files do not say so. A model that reads only text has none.
    - tiktoken_pattern: splits text before a tiktoken.model encodes it.
    - split_at_images: whether each stretch of text between two image tags is tokenised separately.
    - image_tag: what the template writes for an image.
    """

    placeholder: str
    placeholder_token_id: int | None = None
    tiktoken_pattern: str | None = None
    image_tag: ImageTag | None = None
    split_at_images: bool = False

    @property
    def protected(self) -> tuple[int | str, ...]:
        """The token that is special even if the files do not say so."""
        if self.placeholder_token_id is not None:
            return (self.placeholder_token_id,)
        return (self.placeholder,) if self.placeholder else ()


def load_tokenizer(files: Mapping[str, bytes], tokenizer_config: Mapping[str, Any], needs: TokenizerNeeds) -> Tokenizer:
    """Return a checkpoint's tokenizer from its *files*, by name. Raises StartupError.

    A tiktoken.model takes precedence over a tokenizer.json, which is a conversion, if the family has a
    tiktoken_pattern. *tokenizer_config* is the parsed tokenizer_config.json, or {} if there is none.
    """
    if TIKTOKEN in files and needs.tiktoken_pattern is not None:
        pattern = needs.tiktoken_pattern
        return TiktokenTokenizer(files[TIKTOKEN], tokenizer_config, pattern, needs.protected)
    if TOKENIZER not in files:
        reason = (
            f"{TIKTOKEN} cannot be used, because this family declares no pattern to split text"
            if TIKTOKEN in files
            else ""
        )
        raise StartupError(f"The model has no {TOKENIZER}{reason and '; '}{reason}.")
    if needs.split_at_images and needs.image_tag is not None:
        return ImagewiseTokenizer(files[TOKENIZER], tokenizer_config, needs.image_tag, *needs.protected)
    return JsonTokenizer(files[TOKENIZER], tokenizer_config, needs.protected)
