"""What /v1/batches and its files contain, as in OpenAI's API."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

MAX_LINES: Final = 50_000
MAX_METADATA: Final = 16
WINDOW: Final = "24h"
WINDOW_SECONDS: Final = 24 * 3600

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]


class OutputExpiry(Struct, frozen=True, forbid_unknown_fields=True):
    """How many *seconds* the output and the error file are kept after they were made."""

    seconds: int
    anchor: Literal["created_at"]


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that creates a batch."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: Annotated[str, Meta(max_length=64)]
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class RequestCounts(Struct, frozen=True):
    """How many requests a batch has, and how many of them were answered with and without an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(Struct, frozen=True, kw_only=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(Struct, frozen=True):
    """Why a batch failed, as a list."""

    data: list[BatchFault]
    object: Literal["list"] = "list"


class InputDetails(Struct, frozen=True):
    """How many prompt tokens were cached."""

    cached_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """How many answer tokens were reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True):
    """The tokens of all answers of a batch."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Batch(Struct, frozen=True, kw_only=True):
    """A batch; times are seconds since 1970. *model* is None if its requests name several."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    model: str | None = None
    usage: BatchUsage | None = None
    output_expires_after: OutputExpiry | None = None
    completion_window: str = WINDOW
    object: Literal["batch"] = "batch"


class BatchList(Struct, frozen=True):
    """A page of a tenant's batches, the newest first. *has_more* says whether more follow *last_id*."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Line(Struct, frozen=True):
    """A line of the input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class LineBody(Struct, frozen=True):
    """What a batch reads of the body of a request. The API reads the rest."""

    model: Any = None
    stream: Any = None


class LineAnswer(Struct, frozen=True, omit_defaults=True):
    """The response to a request of a batch. *warning* is what `x-saccade-warning` would be."""

    status_code: int
    request_id: str
    body: msgspec.Raw
    warning: str = ""


class LineError(Struct, frozen=True):
    """Why a line was not asked."""

    code: str
    message: str


class OutputLine(Struct, frozen=True):
    """A line of the output or the error file."""

    id: str
    custom_id: str | None
    response: LineAnswer | None
    error: LineError | None


def error_line(line_id: str, custom_id: str | None, code: str, message: str) -> bytes:
    """Return a line of the error file for a request that was not asked."""
    return msgspec.json.encode(OutputLine(line_id, custom_id, None, LineError(code, message)))


def answer_line(line_id: str, custom_id: str | None, status: int, body: bytes, warning: str) -> bytes:
    """Return a line of the output or the error file for a request that was answered."""
    answer = LineAnswer(status, line_id, msgspec.Raw(body), warning)
    return msgspec.json.encode(OutputLine(line_id, custom_id, answer, None))
