"""The wire format of /v1/models, /tokenize and /detokenize."""

from datetime import datetime
from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from saccade.gateway.apis.text_files import with_text_files
from saccade.gateway.body_bounds import check_messages
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.field_schemas import MAX_TOKENS, TokenId
from saccade.gateway.parameters import ParameterReader
from saccade.models.family import BoxCoordinates

_TOKENIZE: Final = ParameterReader(TokenizeRequest, (ChatRequest,))


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class TokenizeAnswer(Struct, frozen=True):
    """The prompt's token ids, including the placeholders that the model sees in place of images."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(Struct, frozen=True):
    """The text that the token ids stand for."""

    prompt: str


class ModelCard(Struct, frozen=True):
    """A served model under one of its names; *root* is its first name, which appears in answers.

    *input_modalities* lists the content that the model reads: text, and images and videos if it takes them. *note* says
    what users must know about the model's answers; most models have no note. *box_coordinates* are those of the boxes
    in its answers, if it was trained for boxes.
    """

    id: str
    root: str
    created: int
    max_model_len: int
    input_modalities: tuple[str, ...]
    object: Literal["model"] = "model"
    owned_by: str = "saccade"
    note: str | UnsetType = UNSET
    box_coordinates: BoxCoordinates | UnsetType = UNSET


class ModelList(Struct, frozen=True):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class ModelInfo(Struct, frozen=True, tag="model"):
    """A served model, in Anthropic's form."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int


class ModelPage(Struct, frozen=True):
    """All served models, as one page in Anthropic's format."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False

    @classmethod
    def of_models(cls, models: list[ModelInfo]) -> "ModelPage":
        """Return *models* as a page."""
        return cls(models, models[0].id if models else None, models[-1].id if models else None)


def parse_tokenize(body: bytes | bytearray, strict: bool = False) -> tuple[TokenizeRequest, str]:
    """Parse *body*; return the tokenize request and a warning. Raises the same errors as parse_chat()."""
    request, warning = _TOKENIZE.read_parameters(body, strict)
    check_messages(request.messages or ())
    if request.messages:
        request = structs.replace(request, messages=with_text_files(request.messages))
    return request, warning


def parse_detokenize(body: bytes | bytearray, strict: bool = False) -> tuple[DetokenizeRequest, str]:
    """Parse *body*; return the detokenize request and a warning. Raises the same errors as parse_chat()."""
    return _DETOKENIZE.read_parameters(body, strict)


_DETOKENIZE: Final = ParameterReader(DetokenizeRequest)
