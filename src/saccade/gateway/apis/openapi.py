"""The OpenAPI description of the HTTP API, generated from the request and answer structs."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from saccade.gateway.apis.batches.wire import Batch, BatchList, BatchRequest
from saccade.gateway.apis.chat.wire import ChatCompletion
from saccade.gateway.apis.completions.reader import CompletionRequest
from saccade.gateway.apis.completions.wire import Completion
from saccade.gateway.apis.files import BATCH_PURPOSE, MAX_LISTED, PURPOSES, DeletedFile, FileList
from saccade.gateway.apis.messages.wire import CountAnswer, CountRequest, MessageAnswer, MessagesRequest
from saccade.gateway.apis.models import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelInfo,
    ModelList,
    ModelPage,
    TokenizeAnswer,
)
from saccade.gateway.apis.responses.wire import DeletedResponse, Response, ResponseRequest
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.images.file_store import FileObject
from saccade.gateway.server.errors import ErrorAnswer, MessagesError
from saccade.release import installed_version

BODIES = (
    ChatRequest, ChatCompletion, CompletionRequest, Completion,
    TokenizeRequest, TokenizeAnswer, DetokenizeRequest, DetokenizeAnswer,
    ModelList, ModelCard, ModelPage, ModelInfo, ErrorAnswer,
    MessagesRequest, MessageAnswer, CountRequest, CountAnswer, MessagesError,
    ResponseRequest, Response, DeletedResponse, FileObject, FileList, DeletedFile,
    Batch, BatchList, BatchRequest,
)  # fmt: skip
POST_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "The model is not served here.",
    413: "The body is too large.",
    415: "Content-Type must be application/json.",
    429: "Too many requests are being served.",
    500: "The server failed.",
    503: "No worker is ready, or the server is shutting down.",
    504: "A stage took too long.",
}
MODEL_ID = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
VERSION = {"name": "anthropic-version", "in": "header", "schema": {"type": "string"}}
RESPONSE_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
FILE_ID = {"name": "file_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
BATCH_ID = {"name": "batch_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
PAGE_NUMBER = {"name": "number", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 1}}
FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [*PURPOSES, BATCH_PURPOSE]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 1},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
LISTING = [
    {"name": "purpose", "in": "query", "schema": {"type": "string"}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
ANYTHING = {"type": "object"}
LOAD = {"type": "object", "properties": {"server_load": {"type": "integer"}}, "required": ["server_load"]}
_NAME = re.compile(r"\*(\w+)\*")
"""A field's name in a docstring."""

TINY_IMAGE = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
"""An image of one pixel."""


def describe(models: Sequence[str] = (), root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document for a server at *root_path*; its examples use the served *models*."""
    _, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    for schema in components.values():
        if "description" in schema:
            schema["description"] = _as_markdown(schema["description"])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Saccade", "version": installed_version(), "description": "Serves vision-language models."},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": _paths(models),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _as_markdown(docstring: str) -> str:
    """Return *docstring* as OpenAPI's Markdown: names of fields are code there."""
    return _NAME.sub(r"`\1`", inspect.cleandoc(docstring))


def _paths(models: Sequence[str]) -> dict[str, Any]:
    chat = _generation("Answer a chat", ChatRequest, ChatCompletion)
    chat["requestBody"]["content"]["application/json"]["examples"] = {name: _example(name) for name in models}
    completion = _generation("Complete prompts", CompletionRequest, Completion)
    messages = _generation("Answer a chat in Anthropic's format", MessagesRequest, MessageAnswer, MessagesError)
    invocation = _generation("As the API of the body", ChatRequest, ChatCompletion)
    invocation["requestBody"]["content"] = _json(ChatRequest, CompletionRequest)
    invocation["responses"]["200"]["content"] |= _json(ChatCompletion, Completion)
    stored = {
        "get": _get("Return a stored response", _json(Response), 400, 404),
        "delete": _get("Delete a response", _json(DeletedResponse), 400, 404),
        "parameters": [RESPONSE_ID],
    }
    count = _post("Count the tokens of a chat", CountRequest, CountAnswer, MessagesError)
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/messages": {"post": messages},
        "/v1/messages/count_tokens": {"post": count},
        "/v1/responses": {"post": _generation("Answer a chat, or continue one", ResponseRequest, Response)},
        "/v1/responses/{response_id}": stored,
        "/invocations": {"post": invocation},
        **_files(),
        **_batches(),
        "/v1/models": {"get": _get("List the models", _json(ModelList, ModelPage)) | {"parameters": [VERSION]}},
        "/v1/models/{model}": {
            "get": _get("Describe a model", _json(ModelCard, ModelInfo), 404) | {"parameters": [MODEL_ID, VERSION]},
        },
        "/tokenize": {"post": _post("Turn text or a chat into token ids", TokenizeRequest, TokenizeAnswer)},
        "/detokenize": {"post": _post("Turn token ids into text", DetokenizeRequest, DetokenizeAnswer)},
        "/pdf_pages/{number}": {"post": _pdf_page()},
        "/live": {"get": _get("The process runs", _schema(ANYTHING))},
        "/ready": {"get": _get("Requests can be served", _schema(ANYTHING), 503)},
        "/health": {"get": _get("As /ready", _schema(ANYTHING), 503)},
        "/ping": {
            "get": _get("As /ready", _schema(ANYTHING), 503),
            "post": _get("As /ready", _schema(ANYTHING), 503),
        },
        "/load": {"get": _get("The number of requests in work", _schema(LOAD))},
        "/metrics": {"get": _get("Metrics for Prometheus", {"text/plain": {"schema": {"type": "string"}}})},
        "/version": {"get": _get("The server's version", _schema(ANYTHING))},
        "/openapi.json": {"get": _get("This document", _schema(ANYTHING))},
    }


def _files() -> dict[str, Any]:
    upload = _get("Store an image for later requests", _json(FileObject), *POST_ERRORS)
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "/v1/files": {
            "post": upload,
            "get": _get("List the stored files", _json(FileList), 400) | {"parameters": LISTING},
        },
        "/v1/files/{file_id}": {
            "get": _get("Describe a file", _json(FileObject), 400, 404),
            "delete": _get("Delete a file", _json(DeletedFile), 400, 404),
            "parameters": [FILE_ID],
        },
        "/v1/files/{file_id}/content": {
            "get": _get("Return a file", content, 400, 404) | {"parameters": [FILE_ID]},
        },
    }


def _batches() -> dict[str, Any]:
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}}
    after = {"name": "after", "in": "query", "schema": {"type": "string"}}
    return {
        "/v1/batches": {
            "post": _post("Answer a file of requests", BatchRequest, Batch),
            "get": _get("List the batches", _json(BatchList), 400) | {"parameters": [after, limit]},
        },
        "/v1/batches/{batch_id}": {
            "get": _get("Describe a batch", _json(Batch), 400, 404),
            "parameters": [BATCH_ID],
        },
        "/v1/batches/{batch_id}/cancel": {
            "post": _get("Cancel a batch", _json(Batch), 400, 404),
            "parameters": [BATCH_ID],
        },
    }


def _pdf_page() -> dict[str, Any]:
    file = {"schema": {"type": "string", "format": "binary"}}
    drawn = _get("Draw a page of a PDF", {"image/png": file}, *POST_ERRORS) | {"parameters": [PAGE_NUMBER]}
    drawn["requestBody"] = {"required": True, "content": {"application/pdf": file}}
    return drawn


def _example(model: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": TINY_IMAGE}}, {"type": "text", "text": "What does it say?"}]
    return {"value": {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 16}}


def _reference(body: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _json(*bodies: type) -> dict[str, Any]:
    """Describe JSON content that is one of *bodies*."""
    first, *others = map(_reference, bodies)
    return _schema({"anyOf": [first, *others]} if others else first)


def _errors(*statuses: int, error: type = ErrorAnswer) -> dict[str, Any]:
    words = {
        **POST_ERRORS,
        401: "The API key is missing or unknown.",
        403: "Without keys: the host or the origin of the request is not allowed.",
    }
    every = (401, 403, *statuses)
    return {str(status): {"description": words[status], "content": _json(error)} for status in every}


def _get(summary: str, content: dict[str, Any], *statuses: int) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **_errors(*statuses)},
    }


def _post(summary: str, request: type, answer: type, error: type = ErrorAnswer) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {"200": {"description": summary, "content": _json(answer)}, **_errors(*POST_ERRORS, error=error)},
    }


def _generation(summary: str, request: type, answer: type, error: type = ErrorAnswer) -> dict[str, Any]:
    described = _post(summary, request, answer, error)
    described["responses"]["200"]["content"]["text/event-stream"] = {}  # several kinds of events: no one schema
    return described
