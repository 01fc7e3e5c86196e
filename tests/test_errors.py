"""The exception tree is what the wire and HTTP rely on."""

import ast
import re
from pathlib import Path

import pytest
from parsed_sources import parsed_modules
from tables import table

from saccade import errors
from saccade.errors import (
    InternalError,
    InvalidValue,
    QueueFull,
    RateLimitExceeded,
    RequestError,
    SaccadeError,
    from_code,
)

SOURCE = Path(errors.__file__).parent
CONSTANT = re.compile(r"[A-Z_]+(\.format\(first=[\w.]+\))?|len\([\w.]+\)")
"""A sentence of ours, or a number."""

JUDGED = {
    "engine/core/request_validation.py": {"most", "num_positions", "self.max_model_len"},
    "engine/core/requests.py": {"problem"},
    "engine/core/scheduler.py": {"num_requests"},
    "engine/installed.py": {"needed_by"},
    "fair_queue.py": {"num_own - 1", "self._wait_seconds", "self._what"},
    "gateway/admin.py": {"', '.join(missed)", "error.message"},
    "gateway/admission.py": {"num_own", "self._max_requests"},
    "gateway/byte_budget.py": {"nbytes", "needed", "self.capacity_bytes"},
    "gateway/images/decode_pool/pool.py": {"job.medium", "limit"},
    "gateway/images/decode_pool/queue.py": {"self.total_seconds"},
    "gateway/images/decode_pool/server.py": {"name"},
    "gateway/output/sampling.py": {"field", "limit", "max_model_len", "num_prompt_tokens", "request.needed_tokens"},
    "gateway/prompt/prompt_builder.py": {
        "field",
        "kind",
        "least",
        "most",
        "num_completion(request)",
        "number",
        "served.max_model_len",
    },
    "gateway/prompt/prompt_bounds.py": {
        "completion",
        "least",
        "num_completion(request)",
        "num_prompt_tokens",
        "served.max_model_len",
    },
    "gateway/served_models/model_registry.py": {"name"},
    "gateway/server/body.py": {"max_bytes", "self.max_bytes"},
    "gateway/server/connection.py": {"sentence"},
    "gateway/server/content_coding.py": {"reason"},
    "gateway/server/middleware.py": {"method"},
    "gateway/tenants/account.py": {"bucket.per_minute", "self.tenant.name", "wait_seconds", "what"},
    "gateway/tenants/api_keys.py": {"self._kind"},
    "fleet/prompt_lookup.py": {"serving.model.name"},
    "fleet/pool.py": {"name", "served"},
    "fleet/prompt.py": {"description.max_model_len", "prompt.sampling.max_tokens"},
    "fleet/legs.py": {"error.message"},
    "media/pdf_pages.py": {"num_pages", "self.max_pages"},
    "models/preprocessing/decoded.py": {"count"},
    "tokenization/template_program.py": {"refusal"},
    "connectors/native/client.py": {"request.request_id", "sentence"},
    "connectors/events/publisher.py": {"unanswered"},
    "connectors/smg/client.py": {"description.pixel_dtype", "item.pixel_dtype", "session.exactness.reason"},
    "connectors/smg/kv_events.py": {"error.code().name"},
    "connectors/vllm/answer.py": {"LOST if begun else GIVEN_UP"},
    "connectors/vllm/http.py": {"fault", "path"},
    "connectors/events/reported_cache.py": {"context.max_pages"},
    "connectors/vllm/server.py": {"path", "status"},
    "connectors/native/feed.py": {"error.code().name"},
    "transport/kv_transfer/events.py": {"self.reason"},
    "worker/local_client.py": {"refused.sentence", "sentence"},
    "worker/tokenspeed/requests.py": {"model.description.max_model_len"},
    "models/__init__.py": {"family.library", "reason"},
}
"""Numbers, names that operators chose, and sentences of ours and of our workers: never what a client sent."""


def leaves(kind: type[SaccadeError]) -> list[type[SaccadeError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


NAMED = [kind for kind in leaves(SaccadeError) if not kind.__subclasses__()]


@table("kind", NAMED)
def test_code_crosses_a_process_border_and_comes_back(kind: type[SaccadeError]) -> None:
    error = from_code(kind.code, "What was wrong.", "messages[0]")
    assert type(error) is kind
    assert (error.message, error.param) == ("What was wrong.", "messages[0]")


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in NAMED]
    assert len(set(codes)) == len(codes)


def test_unknown_code_is_our_fault() -> None:
    assert type(from_code("no_such_code", "")) is InternalError


def test_text_of_another_process_is_cleaned() -> None:
    words = "a\x1b[31mb\r\nc" + "x" * 5000
    error = from_code("worker_failed", words, words)
    assert error.message.startswith("a [31mb  cxx")
    assert len(error.message) == 2000
    assert error.param == error.message


def test_docstring_lists_the_tree_of_errors() -> None:
    drawn = {line.split("─ ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "─ " in line}
    assert drawn == {kind.__name__ for kind in leaves(SaccadeError)} - {"SaccadeError"}


def logged_values() -> dict[str, set[str]]:
    """The values in sentences that the log repeats, as expressions, by the file that makes the sentence."""
    kinds = {kind.__name__ for kind in leaves(SaccadeError)}
    logged = {kind.__name__ for kind in leaves(SaccadeError) if kind.is_logged} - {"StartupError"}
    found: dict[str, set[str]] = {}
    for path, module in parsed_modules().items():
        for call in ast.walk(module):
            if not isinstance(call, ast.Call) or (name := ast.unparse(call.func).removesuffix(".of")) not in kinds:
                continue
            sentences = call.args[:4] if name == "ContextLengthExceeded" else call.args[: name in logged]
            sentences += [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
            for sentence in sentences:
                parts = sentence.values if isinstance(sentence, ast.JoinedStr) else [sentence]
                values = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                texts = {ast.unparse(value) for value in values if not isinstance(value, ast.Constant)}
                if texts := {text for text in texts if not CONSTANT.fullmatch(text)}:
                    found.setdefault(str(path.relative_to(SOURCE)), set()).update(texts)
    return found


@pytest.mark.guard
def test_the_log_repeats_no_value_that_nobody_judged() -> None:
    """A client's text must not get there: such an error has a class that is not logged, or a *reason*."""
    assert logged_values() == JUDGED


def test_a_request_error_is_logged_without_its_message() -> None:
    assert InvalidValue("`model` is 'their text'.", "model").reason == ""
    assert InvalidValue("`model` is 'their text'.", reason="It is wrong.").reason == "It is wrong."
    assert QueueFull("Too many.").reason == InternalError("Too many.").reason == "Too many."


@table(
    "error",
    [
        InvalidValue("a"),
        InvalidValue("a", reason="b"),
        QueueFull("a"),
        RateLimitExceeded("a", retry_after_seconds=7),
        InvalidValue("a", "its own"),
    ],
)
def test_an_error_that_is_placed_keeps_all_else(error: RequestError) -> None:
    placed = error.at("field")
    assert type(placed) is type(error)
    assert vars(placed) == {**vars(error), "param": error.param or "field"}
    assert str(placed) == "a"
