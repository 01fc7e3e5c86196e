"""schemathesis against the server's /openapi.json: requests that fit the description, and others that do not."""

import json
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from judges.environments import environment
from judges.judge import Judge
from judges.outcomes import FAILED, PASSED, Outcome
from judges.pytest_suite import RUN_SECONDS
from judges.servers import model_server, tiny_model

VERSION = "4.32.5"
PACKAGES = (f"schemathesis=={VERSION}", "hypothesis==6.170.15")
PHASES = ("--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--seed", "7")
CHECKS = (
    "Server error",
    "Undocumented HTTP status code",
    "Undocumented Content-Type",
    "Response violates schema",
    "Schema-valid request rejected",
    "Schema-violating request accepted",
    "Allow header mismatch",
)
"""The titles of its failures: each is a test of each operation."""
MODEL = tiny_model("qwen3_vl")
SHORT = ("--max-model-len", "64")
METHODS = ("get", "put", "post", "delete", "patch")


def run(cache: Path, skips: frozenset[str]) -> Iterable[Outcome]:
    """Send what schemathesis thinks of, to a random model with a short context: most of it generates until that is full."""
    python = environment("schemathesis", PACKAGES, cache)
    with tempfile.TemporaryDirectory() as scratch, model_server(MODEL(Path(scratch)), (), *SHORT) as server:
        address = f"{server.url}/openapi.json"
        with urllib.request.urlopen(address, timeout=60) as answer:
            description = json.load(answer)
        flags = ("--no-color", "--continue-on-failure", "--generation-database", "none", "--report", "json")
        words = [python.with_name("schemathesis"), "run", address, *PHASES, *flags, "--report-json-path", "report.json"]
        done = subprocess.run(words, cwd=scratch, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS)
        report = Path(scratch, "report.json")
        if not report.exists():
            return [Outcome("::the run", FAILED, f"exit code {done.returncode}: {done.stdout[-2000:]}")]
        return list(read_report(description, json.loads(report.read_text()), done.stdout))


def read_report(description: Any, report: Any, said: str) -> Iterator[Outcome]:
    """A test for each operation and check, and for each failure that is of neither; *said* has why, by operation."""
    _, *parts = re.split(r"^_+ (\S+ \S+) _+$", said, flags=re.MULTILINE)
    why = dict(zip(parts[::2], parts[1::2], strict=True))
    failed = {(operation, one["title"]) for one in report["failures"] for operation in one["operations"]}
    operations = [
        f"{method.upper()} {path}"
        for path, found in description["paths"].items()
        for method in METHODS
        if method in found
    ]
    for operation, check in dict.fromkeys([*((one, check) for one in operations for check in CHECKS), *sorted(failed)]):
        is_failure = (operation, check) in failed
        yield Outcome(
            f"{operation}::{check}", FAILED if is_failure else PASSED, why.get(operation, "") if is_failure else ""
        )
    if not report["complete"] or report["errors"] or report["operations"]["tested"] != report["operations"]["selected"]:
        yield Outcome("::the run", FAILED, f"is not complete: {report['stop_reason']}, errors: {report['errors']}")


SAYS = """\
The phases examples, coverage and fuzzing of schemathesis, with all its checks, on /openapi.json and a random model. A
test is a check of an operation. Its stateful phase is left out: /openapi.json has no links."""
JUDGE = Judge("schemathesis", f"schemathesis-{VERSION}", SAYS, run)
