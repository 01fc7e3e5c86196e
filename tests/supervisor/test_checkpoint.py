"""Where a model comes from: a folder, or the hub (a small one of our own). # A5"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import running_hub
from tables import table

from saccade.errors import StartupError
from saccade.supervisor.checkpoint import resolve_model


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_hub() as address:
        yield address


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


@pytest.mark.ci
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
    assert said.startswith(f"error: There is no folder {name} here. The model {name} could not be fetched: ")
    assert cause in said
