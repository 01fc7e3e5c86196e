"""Whatever a child does, its parent waits no longer, and keeps no more, than it says."""

from pathlib import Path

import pytest
from tables import table

from saccade.gateway.limited_child import ChildLimits, Ending, LimitedChild

BEGIN = (
    "import os, sys; from saccade.gateway.limited_child import begin_task; "
    "print(end='', flush=True); begin_task(type(None))"
)


@pytest.mark.ci
@table(
    "program, wait_seconds, ending",
    [
        ("import os, time; os.close(1); time.sleep(600)", 3.0, Ending(b"", -9, False)),
        ("while True: print(9)", 600.0, Ending(b"9\n9\n", -9, True)),
        ("print(9); exit(3)", 600.0, Ending(b"9\n", 3, True)),
        ("import os; os.write(1, b'9'); os.kill(os.getpid(), 9)", 600.0, Ending(b"9", -9, True, was_killed=True)),
        ("import os; os.kill(os.getpid(), 6)", 600.0, Ending(b"", -6, True)),
        (f"{BEGIN}; os.abort()", 600.0, Ending(b"", -6, True)),
        (f"{BEGIN}; print(len(sys.stdin.read()))", 600.0, Ending(b"0\n", 0, True)),
        (f"{BEGIN}; os.write(2, b'x' * 2000000); print(9)", 600.0, Ending(b"9\n", 0, True)),
        ("import os; print(int(os.getsid(0) == os.getpid()))", 600.0, Ending(b"1\n", 0, True)),
    ],
    ids=[
        *("closes its output and sleeps", "writes without end", "ends", "is killed", "aborts", "aborts, confined"),
        *("reads on", "prints errors without end", "looks for a session"),
    ],
)
def test_child_ends_within_its_limits(
    program: str, wait_seconds: float, ending: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limited.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert LimitedChild("limited", None, ChildLimits(600, 1 << 30)).run_child(wait_seconds, 4) == ending
