"""A small model hub on loopback, with the few routes that a snapshot needs."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ x }}",
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"pickle",
}


class Hub(BaseHTTPRequestHandler):
    """The few routes of the hub that a snapshot needs, for one repository, acme/eye, and for some that are troubled.

    acme/shut is gated, acme/private wants a token, acme/torn lacks a file, acme/cut breaks off in the weights' middle.
    acme/good has the config.json of a supported architecture.
    """

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "acme/shut" in path:
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "acme/private" in path and self.headers.get("Authorization") != "Bearer hf_right":
            self.answer(401, b"{}", {})
        elif path.startswith("/acme/cut/resolve/") and path.endswith(".safetensors") and self.command == "GET":
            self.answer(
                200, FILES["model.safetensors"][:3], {"Content-Length": "7", "ETag": '"w"', "X-Repo-Commit": COMMIT}
            )
            self.close_connection = True
        elif path.startswith("/api/models/acme/") and "/tree/" in path:
            self.answer(200, json.dumps([self.entry(name, content) for name, content in FILES.items()]).encode())
        elif path.startswith("/api/models/acme/") and "none" not in path:
            self.answer(200, json.dumps({"id": "acme/eye", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith("/acme/torn/resolve/") and path.endswith(".safetensors"):
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        elif path.startswith("/acme/") and "/resolve/" in path:
            content = FILES[path.rpartition("/")[2]]
            if path.startswith("/acme/good/") and path.endswith("config.json"):
                content = b'{"architectures": ["LlavaForConditionalGeneration"]}'
            self.answer(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def entry(self, name: str, content: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def running_hub() -> Iterator[str]:
    """Run the hub; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
