"""Where a model comes from: a folder, or the hub (a small one of our own). # A5"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.supervisor.checkpoint import resolve_model

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


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def resolve(name: str, endpoint: str, home: Path, offline: str = "0", weights: bool = True, token: str = "") -> str:
    """What resolve_model says in a process of its own: the hub's client reads its settings when it is imported."""
    program = (
        "import sys, time; time.sleep = lambda _: None  # the hub's client waits between its tries\n"
        "from saccade.errors import StartupError; from saccade.supervisor.checkpoint import resolve_model\n"
        "try: print(resolve_model(sys.argv[1], weights=sys.argv[2] == 'True'))\n"
        "except StartupError as error: print('error:', error.message)"
    )
    environment = {
        **os.environ,
        "HF_TOKEN": token,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": offline,
    }
    done = subprocess.run(
        [sys.executable, "-c", program, name, str(weights)], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_local_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@table("name", ["./not/here", "/not/here", "~/not-here", "too/many/parts", "", "a b", "x/../y"])
def test_invalid_model_name_is_refused(name: str) -> None:
    with pytest.raises(StartupError):
        resolve_model(name)


def test_folder_without_config_is_never_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "eye").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=r"acme/eye has no config\.json"):
        resolve_model("acme/eye")


def test_fetched_once_without_code_or_pickles(endpoint: str, tmp_path: Path) -> None:
    folder = Path(resolve("acme/eye", endpoint, tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json", "model.safetensors"]
    assert resolve("acme/eye", "http://127.0.0.1:9", tmp_path, offline="1") == str(folder)


def test_a_gateway_fetches_no_weights(endpoint: str, tmp_path: Path) -> None:
    folder = Path(resolve("acme/eye", endpoint, tmp_path, weights=False))
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json"]


def test_token_opens_a_private_repository(endpoint: str, tmp_path: Path) -> None:
    assert (Path(resolve("acme/private", endpoint, tmp_path, token="hf_right")) / "config.json").is_file()


@table(
    ("name", "offline", "cause"),
    [
        ("acme/none", "0", "no such repository"),
        ("acme/shut", "0", "gated"),
        ("acme/private", "0", "private and HF_TOKEN does not open it"),
        ("acme/torn", "0", "answered 404 for /acme/torn/resolve/"),
        ("acme/cut", "0", "what has arrived is kept"),
        ("acme/eye", "1", "HF_HUB_OFFLINE is set"),
    ],
)
def test_error_names_repository_and_cause(endpoint: str, tmp_path: Path, name: str, offline: str, cause: str) -> None:
    said = resolve(name, endpoint, tmp_path, offline)
    assert said.startswith(f"error: The model {name} could not be fetched: ")
    assert cause in said
