"""Run a suite of pytest in a process of its own, and read what became of its tests."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from judges.outcomes import FAILED, Outcome

RUN_SECONDS = 580
"""A judge ends within ten minutes."""
INHERITED = ("PATH", "HOME", "LANG")
"""What a suite sees of this process's environment: no key, no address of another server."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """Tests of pytest: the interpreter, the folder that their names are relative to, and what of it runs."""

    python: Path
    folder: Path
    tests: Sequence[str]
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    import_from: Sequence[Path] = ()
    """Folders that the suite imports from before all others."""


def run_suite(suite: Suite, skips: Iterable[str], seconds: float = RUN_SECONDS) -> list[Outcome]:
    """Run the suite without the tests in *skips*. One that has no end is a failure with the name of the run."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes, names = Path(scratch, "outcomes"), Path(scratch, "skips")
        outcomes.touch()
        names.write_text("".join(json.dumps(name) + "\n" for name in sorted(skips)))
        words = [str(suite.python), "-P", "-m", "pytest", "-p", "recorder", "-p", "no:cacheprovider", "--tb=short"]
        environment = {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            **suite.environment,
            "PYTHONPATH": os.pathsep.join(map(str, (*suite.import_from, HERE / "recording"))),
            "JUDGE_OUTCOMES": str(outcomes),
            "JUDGE_SKIPS": str(names),
        }
        said = _run([*words, *suite.options, *suite.tests], suite.folder, environment, seconds)
        found = [Outcome(**json.loads(line)) for line in outcomes.read_text().splitlines()]
    if said is not None or not found:
        found.append(Outcome("::the run", FAILED, said or "no test ran"))
    return found


def _run(words: list[str], folder: Path, environment: dict[str, str], seconds: float) -> str | None:
    """Run the command; return what went wrong with the run itself, which is not that tests fail."""
    process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"no end within {seconds} s"
    finally:
        _end(process)
    return None if code in (0, 1) else f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
