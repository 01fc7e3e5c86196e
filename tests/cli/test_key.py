"""`saccade key` makes keys that the file takes, and refuses those that could be guessed."""

import hashlib
import io
import sys

import pytest
from tables import table

from saccade.cli.main import run
from saccade.gateway.tenants.key_table import digest_of, parse_keys

KEY = hashlib.md5(b"a key").hexdigest()


def test_new_key_is_printed_with_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "new", "--tenant", "acme"]) == 0
    out, err = capsys.readouterr()
    made = err.split()[-1]
    assert made not in out
    assert len(made) > 40
    table = parse_keys(f"[tenants.acme]\n{out}".encode(), {})
    assert table.names == {digest_of(made.encode()): "acme"}
    run(["key", "new", "--tenant", "acme"])
    assert capsys.readouterr().err.split()[-1] != made


def test_entry_of_an_existing_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = KEY
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{given}\n"))
    assert run(["key", "hash", "--tenant", "acme"]) == 0
    out, err = capsys.readouterr()
    assert hashlib.sha256(given.encode()).hexdigest() in out
    assert given not in out + err


@table("given", ["", "short", KEY[:30], "ab" * 20, f"{KEY} x", "é" * 40])
def test_weak_and_unsendable_keys_are_refused(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{given}\n"))
    assert run(["key", "hash", "--tenant", "acme"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "The key on stdin" in err


def test_invalid_tenant_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "new", "--tenant", 'a"b']) == 1
    assert capsys.readouterr().out == ""
