"""POST /invocations, the only path that SageMaker calls: the body's parameters decide which API answers."""

from collections.abc import Collection, Mapping
from typing import Final

from starlette.types import Receive, Scope, Send

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.apis.chat_endpoint import ChatEndpoint, Continuation, ReadApi, ReadBody
from saccade.gateway.parameters import Body, Parameters, read_parameters
from saccade.gateway.server.middleware import ROUTE

PATHS: Final = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The path of each API, by the field that every body of it has."""

OTHERS: Final = ("input", "text_1", "text_2", "query", "queries", "documents", "data")
"""What bodies of vLLM's other APIs have: embeddings, scores, ranks."""

_SERVED: Final = "Send `messages` for a chat, or `prompt` for a completion"


class Invocations:
    """Passes each body to the API that its parameters belong to. Metrics and logs name that API's path.

    *apis* maps each API's path to the function that reads its bodies.
    """

    def __init__(self, chats: ChatEndpoint, apis: Mapping[str, ReadApi]) -> None:
        self._chats = chats
        self._apis = apis

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        def read(body: Body, tenant: bytes) -> ReadBody | Continuation:
            parameters = body if isinstance(body, Parameters) else read_parameters(body)
            path = path_of(parameters.names)
            scope[ROUTE] = path
            return self._apis[path](parameters, tenant)

        await self._chats.serve(read, scope, receive, send)


def path_of(names: Collection[str]) -> str:
    """Return the path of the API whose bodies have the parameters *names*.

    Raises RequestError if no API fits, or several do.
    """
    fields = [field for field in PATHS if field in names]
    if len(fields) > 1:
        raise InvalidValue(f"{_SERVED}, but not both.", fields[1])
    if fields:
        return PATHS[fields[0]]
    if (other := next((name for name in OTHERS if name in names), None)) is not None:
        hint = ", or this body to /v1/responses" if other == "input" else ""
        raise UnsupportedParameter(f"`{other}` is not served at this path. {_SERVED}{hint}.", other)
    raise InvalidValue(f"The body has neither `messages` nor `prompt`. {_SERVED}.", "messages")
