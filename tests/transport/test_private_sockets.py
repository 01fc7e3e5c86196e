"""Where a worker's socket may lie, by default and by --uds."""

import os
import socket
import stat
from pathlib import Path

import pytest
from fronts import Front

from saccade.errors import StartupError
from saccade.transport import private_sockets
from saccade.transport.access import Access
from saccade.transport.private_sockets import (
    MAX_PATH_BYTES,
    admit,
    bound,
    default_path,
    owner_only,
    peer_uid,
    prepare_folder,
)
from saccade.transport.server import WorkerServer

NOBODY = 65_534
UID = os.geteuid()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, and no folder of the session's."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(private_sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_default_lies_in_a_folder_of_the_user_alone(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_path() == temporary / f"saccade-{UID}" / "worker.sock"
    assert default_path().parent.is_dir()  # again
    assert mode(default_path().parent) == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert default_path().parent == temporary / f"saccade-{UID}"  # there is no such folder
    (tmp_path / "runtime").mkdir()
    assert default_path() == tmp_path / "runtime" / "saccade" / "worker.sock"
    assert mode(default_path().parent) == 0o700


@pytest.mark.parametrize("trap", ["wide", "file", "link"])
def test_folder_that_somebody_else_may_have_made_is_refused(temporary: Path, trap: str) -> None:
    folder = temporary / f"saccade-{UID}"
    if trap == "wide":
        folder.mkdir()
        folder.chmod(0o755)
    elif trap == "file":
        folder.touch(0o700)
    else:
        (temporary / "theirs").mkdir(0o700)
        folder.symlink_to(temporary / "theirs")
    with pytest.raises(StartupError, match="mode 0700"):
        default_path()


def test_folders_of_other_users_are_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = temporary / "runtime"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    owner = NOBODY if UID == 0 else UID
    os.chown(runtime, owner, -1)
    me = owner + 1
    monkeypatch.setattr(private_sockets.os, "geteuid", lambda: me)
    (temporary / f"saccade-{me}").mkdir(0o700)
    with pytest.raises(StartupError, match=f"saccade-{me}"):
        default_path()
    with pytest.raises(StartupError, match=f"belongs to uid {owner}"):
        prepare_folder(runtime / "w.sock", ())


def test_missing_folder_is_made_for_those_who_may_connect(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "own" / "w.sock", ())
    prepare_folder(tmp_path / "shared" / "w.sock", (NOBODY,))
    assert mode(tmp_path / "own") == 0o700
    assert mode(tmp_path / "shared") == 0o711
    with pytest.raises(StartupError, match="cannot be made"):
        prepare_folder(tmp_path / "no" / "such" / "w.sock", ())


def test_folder_in_which_others_could_replace_the_socket(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "folder"
    prepare_folder(folder / "w.sock", ())
    assert caplog.text == ""
    folder.chmod(0o777)
    with pytest.raises(StartupError, match="chmod o-w"):
        prepare_folder(folder / "w.sock", ())
    for warned in (0o1777, 0o770):
        caplog.clear()
        folder.chmod(warned)
        prepare_folder(folder / "w.sock", ())
        assert f"other users may write to {folder}:" in caplog.text
        caplog.clear()
        prepare_folder(folder / "own" / "w.sock", ())
        assert (f"other users may write to {folder}:" in caplog.text) == (warned == 0o770)


def test_symbolic_link_is_followed_to_the_folder_that_counts(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "wide")
    with pytest.raises(StartupError, match="chmod o-w"):
        prepare_folder(tmp_path / "link" / "w.sock", ())


def test_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"at most {MAX_PATH_BYTES} bytes"):
        prepare_folder(tmp_path / ("x" * MAX_PATH_BYTES), ())


def test_socket_is_the_owners_from_the_beginning(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with bound(tmp_path / "w.sock", ()):
            assert mode(tmp_path / "w.sock") == 0o600
        with pytest.raises(RuntimeError), owner_only():
            raise RuntimeError
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_list_names_the_allowed_users_and_nobody_else(tmp_path: Path) -> None:
    with bound(tmp_path / "w.sock", (NOBODY, 7, 7)):
        entries = os.getxattr(tmp_path / "w.sock", "system.posix_acl_access")[4:]
        users = [entries[start : start + 8] for start in range(0, len(entries), 8) if entries[start] == 0x02]
        assert [int.from_bytes(entry[4:], "little") for entry in users] == [7, NOBODY]
        assert mode(tmp_path / "w.sock") & 0o007 == 0


def test_file_system_without_lists_is_an_operators_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--allowed-uids cannot be set"):
        admit(Path("/proc/self/status"), (NOBODY,))
    admit(tmp_path / "nothing", ())


def test_peer_is_the_connected_user(tmp_path: Path) -> None:
    with bound(tmp_path / "w.sock", ()) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(str(tmp_path / "w.sock"))
        with listener.accept()[0] as accepted:
            assert peer_uid(accepted) == UID


async def test_second_worker_does_not_take_the_socket_of_a_running_one(tmp_path: Path) -> None:
    first, second = (WorkerServer(Front(), f"unix:{tmp_path}/w.sock", Access()) for _ in range(2))
    await first.start()
    with pytest.raises(StartupError, match="another process listens there"):
        await second.start()
    await first.stop()
    await second.start()
    await second.stop()
