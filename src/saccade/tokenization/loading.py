"""From a checkpoint's files to its tokenizer."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.tokenization.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"


def load_tokenizer(
    files: Mapping[str, bytes], tokenizer_config: Mapping[str, Any], placeholder: str, placeholder_token_id: int | None
) -> Tokenizer:
    """Return the tokenizer of a checkpoint whose *files* are given by name. Raises StartupError.

    The token that stands for pictures is the one of *placeholder_token_id*, where that is None *placeholder*; it counts
    as special whatever the files say.
    """
    if TOKENIZER not in files:
        raise StartupError(f"The model has no {TOKENIZER}.")
    protected = () if placeholder_token_id is None else (placeholder_token_id,)
    return Tokenizer(files[TOKENIZER], tokenizer_config, protected)
