"""Environments of suites: folders with an interpreter and the pinned packages that a suite needs."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(name: str, packages: Sequence[str], cache: Path) -> Path:
    """Return the interpreter of the environment *name* with *packages*, made unless it is there.

    Raises CalledProcessError if a package cannot be installed.
    """
    folder = cache / f"venv-{name}"
    installed, wanted = folder / "installed", "\n".join(packages)
    if not installed.exists() or installed.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *packages], check=True)
        installed.write_text(wanted)
    return folder / "bin/python"
