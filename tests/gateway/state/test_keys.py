"""The key file is made once, is private, and decides all names in the database."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.gateway.state.keys import SECRET_BYTES, StateKeys, read_key_file


def test_a_missing_key_file_is_made_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = read_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path).check == made.check
    assert read_key_file(tmp_path / "other").check != made.check


def test_processes_that_start_together_have_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        checks = {keys.check for keys in threads.map(lambda _: read_key_file(tmp_path / "key"), range(8))}
    assert len(checks) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@table("content", ["", "ab", "zz" * SECRET_BYTES, "ab" * (SECRET_BYTES + 1)])
def test_a_malformed_key_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(StartupError, match="hexadecimal"):
        read_key_file(path)


@table("mode", [0o644, 0o604, 0o620])
def test_a_key_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("ab" * SECRET_BYTES)
    path.chmod(mode)
    with pytest.raises(StartupError, match="chmod 600"):
        read_key_file(path)


def test_a_group_may_read_the_key_file(tmp_path: Path) -> None:
    """A container that does not run as root reads a mounted secret by its group."""
    path = tmp_path / "key"
    path.write_text("ab" * SECRET_BYTES)
    path.chmod(0o440)
    assert read_key_file(path).check == StateKeys(b"\xab" * SECRET_BYTES).check


def test_names_differ_by_key_tenant_kind_and_id() -> None:
    keys = [StateKeys(bytes([number]) * SECRET_BYTES) for number in range(2)]
    tenants = {key.tenant(tenant) for key in keys for tenant in (b"", b"a", b"b")}
    names = {
        key.item(tenant, kind, known_as)
        for key in keys
        for tenant in (b"", b"a", b"a1:")
        for kind in (1, 11)
        for known_as in ("", "a", "1:a")
    }
    assert (len(tenants), len(names)) == (6, 36)
    assert len({keys[0].content_key(b"a"), keys[0].content_key(b"b"), keys[1].content_key(b"a")}) == 3
