"""docs/from-vllm.md says what the declaration of vLLM's flags says."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci


SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_flags.py"


def test_page_follows_the_declaration() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
