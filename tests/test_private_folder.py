"""The folder of a run is its user's alone; a disk that has no place for it is a sentence, not a traceback."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.private_folder import private_folder


def test_the_folder_is_private_and_goes_with_the_block() -> None:
    with private_folder("saccade-test-") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "file").touch()
    assert not folder.exists()


@table("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_no_folder_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(StartupError, match=f"{os.strerror(number)}.*TMPDIR"), private_folder("saccade-test-"):
        pass


def test_a_machine_without_any_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    with pytest.raises(StartupError, match="TMPDIR"), private_folder("saccade-test-"):
        pass
