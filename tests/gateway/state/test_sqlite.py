"""The folder of a SQLite database is private and on a disk of this machine."""

import stat
from pathlib import Path

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.gateway.state import sqlite
from saccade.gateway.state.connection import DatabaseFailed
from saccade.gateway.state.sqlite import FILE_NAME, SHARED_BY_HOSTS, SqliteFolder, file_system

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:40 / /srv rw - nfs4 host:/srv rw
23 22 0:41 / /srv/local rw - xfs /dev/sdb rw
24 21 0:42 / /mnt/a\\040b rw - fuse.sshfs host: rw
25 21 0:43 / /twice rw - ext4 /dev/sdc rw
26 21 0:44 / /twice rw - cifs //host/share rw
"""


@table(
    "folder, kind",
    [
        ("/var/lib/saccade", "ext4"),
        ("/srv", "nfs4"),
        ("/srv/state", "nfs4"),
        ("/srv/local/state", "xfs"),
        ("/srvs", "ext4"),
        ("/mnt/a b/state", "sshfs"),
        ("/twice/state", "cifs"),
    ],
)
def test_the_innermost_mount_says_the_type(folder: str, kind: str) -> None:
    assert file_system(Path(folder), MOUNTS) == kind


def test_without_a_list_of_mounts_the_type_is_unknown() -> None:
    assert file_system(Path("/srv"), "") == ""


def test_a_file_system_of_several_hosts_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {"nfs", "nfs4", "cifs", "sshfs", "9p"} <= SHARED_BY_HOSTS
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 0 0:1 / {tmp_path} rw - nfs host:/ rw\n")
    monkeypatch.setattr(sqlite, "MOUNTS", mounts)
    with pytest.raises(StartupError, match="nfs"):
        SqliteFolder(tmp_path / "state")


def test_the_folder_and_its_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    connection = SqliteFolder(folder).open()
    connection.execute("create table t (a integer)")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes) >= {FILE_NAME, f"{FILE_NAME}-wal"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    connection.close()


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(StartupError, match="chmod 700"):
        SqliteFolder(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(StartupError, match="cannot make"):
        SqliteFolder(tmp_path / "state")


def test_a_damaged_database_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 100)
    with pytest.raises(DatabaseFailed):
        SqliteFolder(tmp_path).open().execute("select 1 from meta")
