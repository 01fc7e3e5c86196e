"""docs/models.md says what the families declare."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci


SCRIPT = Path(__file__).parents[2] / "scripts" / "model_docs.py"


def test_page_follows_the_declarations() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
