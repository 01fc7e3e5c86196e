"""Whatever a child does, its parent waits no longer, and keeps no more, than it says."""

from pathlib import Path

import pytest

from saccade.gateway.limited_child import ChildLimits, LimitedChild

PROGRAMS = {
    "closes its output and sleeps": ("import os, time; os.close(1); time.sleep(600)", 3.0, (b"", -9, False)),
    "writes without end": ("while True: print(9)", 600.0, (b"9\n9\n", -9, True)),
    "ends": ("print(9); exit(3)", 600.0, (b"9\n", 3, True)),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_child_is_ended(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, wait_seconds, ending = PROGRAMS[case]
    (tmp_path / "limited.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert LimitedChild("limited", None, ChildLimits(600, 1 << 30)).run(wait_seconds, 4) == ending
