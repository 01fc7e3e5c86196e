"""The commands of docs/fleet.md back a running database up and restore it, with the files and batches in it."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import postgres
import psycopg
import pytest
import scripted
from waiting import wait_until

from saccade.gateway.config import GatewayConfig
from saccade.gateway.state.settings import StateSettings

PAGE = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text()
CONFIG = GatewayConfig(api_keys=("one",))
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "hi"}}'


def commands(heading: str, first: str) -> str:
    """The block of commands below *heading* with the program *first*."""
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    [block] = [block for block in re.findall(r"(?:^    .+\n)+", section, re.MULTILINE) if f"    {first} " in block]
    return block


def run(folder: Path, first: str, **environment: str) -> None:
    """Run the commands of the page with the program *first* in *folder*."""
    path = os.pathsep.join([str(Path(str(postgres.program("pg_dump"))).parent), os.environ["PATH"]])
    script = f"set -e\n{commands('Back up and restore', first)}"
    subprocess.run(["sh", "-c", script], check=True, cwd=folder, env={**os.environ, "PATH": path, **environment})


@contextlib.contextmanager
def gateway(model: Path, state: StateSettings) -> Iterator[scripted.Gateway]:
    with scripted.running(model, replace(CONFIG, state=state)) as opened:
        opened.answer_two_tokens()
        yield opened


def store(gateway: scripted.Gateway) -> tuple[str, str]:
    """Store a file and a response; a batch has ended."""
    with gateway.client(api_key="one") as client:
        file = client.files.create(file=("requests.jsonl", LINE), purpose="batch").id
        batch = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        return client.responses.create(model="tiny", input="hi").id, batch.id


def check(gateway: scripted.Gateway, response_id: str, batch_id: str) -> None:
    with gateway.client(api_key="one") as client:
        assert client.responses.retrieve(response_id).id == response_id
        output = client.batches.retrieve(batch_id).output_file_id
        assert output is not None
        assert '"custom_id":"a"' in client.files.content(output).text


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs SQLite's program")
def test_a_folder_is_backed_up_and_restored(tiny_qwen3_vl: Path, tmp_path: Path) -> None:  # F20
    state, restored = tmp_path / "state", tmp_path / "restored"
    with gateway(tiny_qwen3_vl, StateSettings(str(state))) as first:
        stored = store(first)
        run(tmp_path, "sqlite3", STATE=str(state))
        with first.client(api_key="one") as client:
            later = client.responses.create(model="tiny", input="later").id
    run(tmp_path, "mkdir", RESTORED=str(restored))
    with gateway(tiny_qwen3_vl, StateSettings(str(restored))) as second:
        check(second, *stored)
        assert second.ask("GET", f"/v1/responses/{later}", Authorization="Bearer one").status == 404


@pytest.mark.skipif(not postgres.IS_INSTALLED, reason="needs PostgreSQL's programs, as in Debian's package postgresql")
def test_postgresql_is_backed_up_and_restored(
    postgres_server: postgres.Postgres, tiny_qwen3_vl: Path, tmp_path: Path
) -> None:  # F20
    urls = []
    for name in ("backed_up", "restored"):
        with psycopg.connect(postgres_server.url, autocommit=True) as connection:
            connection.execute(f"create database {name}".encode())
        urls.append(f"postgresql://{postgres.USER}@/{name}?host={postgres_server.folder}")
    url, restored = urls
    key_file = tmp_path / "key"
    with gateway(tiny_qwen3_vl, StateSettings(url, key_file)) as first:
        stored = store(first)
        run(tmp_path, "pg_dump", SACCADE_STATE=url)
    run(tmp_path, "pg_restore", RESTORED_STATE=restored)
    with gateway(tiny_qwen3_vl, StateSettings(restored, key_file)) as second:
        check(second, *stored)
