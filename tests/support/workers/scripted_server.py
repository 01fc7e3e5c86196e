"""A server that answers chats by a script, and keeps what it was sent."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[["ScriptedServer", dict[str, Any]], tuple[int, str]]
METRICS = """# TYPE saccade_stage_seconds histogram
saccade_stage_seconds_bucket{{stage="decode",le="+Inf"}} {count}
saccade_stage_seconds_sum{{stage="decode"}} {seconds}
saccade_stage_seconds_count{{stage="decode"}} {count}
"""


def event(delta: dict[str, Any] | None = None, **fields: Any) -> str:
    """Return one event of a stream."""
    choices = [] if delta is None else [{"index": 0, "delta": delta}]
    return f"data: {json.dumps({'choices': choices} | fields)}\n\n"


def usage(prompt: int, cached: int | None, completion: int) -> dict[str, Any]:
    """Return the usage of an answer; None is of a server that does not report cached tokens."""
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


def stream(texts: Sequence[str] = ("a", "b", "c"), cached: int | None = 4) -> str:
    """Return the events of an answer with a token for each of *texts*, of a prompt of 10 tokens."""
    parts = [event({"role": "assistant", "content": ""}), *(event({"content": text}) for text in texts), event({})]
    return "".join((*parts, event(usage=usage(10, cached, len(texts))), "data: [DONE]\n\n"))


def plain_answer(server: "ScriptedServer", body: dict[str, Any]) -> tuple[int, str]:
    """Answer with three tokens."""
    return 200, stream()


@dataclass
class ScriptedServer:
    """What the server was sent. *url* is set when it listens."""

    answer: Answer = plain_answer
    key: str | None = None
    model: str = "m"
    shows_metrics: bool = False
    step_bytes: int = 0
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_open: int = 0
    num_open: int = 0

    @property
    def chats(self) -> list[list[dict[str, Any]]]:
        """The messages of each request but the first, which asks what the server is like."""
        return [body["messages"] for body in self.bodies[1:]]

    async def models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({}, status=401)
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "1.2"})

    async def metrics(self, _: web.Request) -> web.Response:
        count = len(self.bodies)
        text = METRICS.format(count=count, seconds=count / 4)
        if self.step_bytes:
            text += f'saccade_step_weight_bytes{{model_name="m",worker="unix:/w.sock"}} {self.step_bytes}\n'
        return web.Response(text=text) if self.shows_metrics else web.Response(status=404)

    async def chat(self, request: web.Request) -> web.Response:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        body = json.loads(await request.read())
        self.bodies.append(body)
        status, text = self.answer(self, body)
        self.num_open -= 1
        return web.Response(status=status, text=text)


@asynccontextmanager
async def listening(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    """Serve on loopback."""
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.get("/v1/models", server.models),
            web.get("/version", server.version),
            web.get("/metrics", server.metrics),
            web.post("/v1/chat/completions", server.chat),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
