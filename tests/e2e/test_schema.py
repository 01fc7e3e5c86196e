"""The server does what its /openapi.json says, whatever it is sent: schemathesis, a client we did not write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from server import serving

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ALL_PHASES = ("--max-examples", "20")
IN_CI = ("--max-examples", "1", "--phases", "examples,fuzzing")
PDFS_AS_BYTES = """
import schemathesis

schemathesis.serializer.alias("application/pdf", "application/octet-stream")
"""


@pytest.mark.parametrize(
    "flags",
    [pytest.param(IN_CI, marks=pytest.mark.ci), pytest.param(ALL_PHASES, marks=pytest.mark.conformance)],
    ids=len,
)
def test_schemathesis(tiny_qwen3_vl: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "hooks.py").write_text(PDFS_AS_BYTES)
    program = Path(sys.executable).with_name("schemathesis")
    # A short context: most of what is sent generates until it is full.
    with serving(str(tiny_qwen3_vl), "--max-model-len", "64") as server:
        command = [str(program), "run", f"{server.url}/openapi.json", "--checks", CHECKS, *flags]
        done = subprocess.run(
            [*command, "--seed", "1", "--no-color"],
            cwd=tiny_qwen3_vl.parent,
            env=os.environ | {"SCHEMATHESIS_HOOKS": str(tmp_path / "hooks.py")},
            capture_output=True,
            text=True,
            timeout=400,
        )
        generated = server.settled("vllm:generation_tokens_total")
    assert done.returncode == 0, done.stdout[-4000:]
    assert generated > 0  # it was answered, not only refused
