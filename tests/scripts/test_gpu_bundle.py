"""scripts/gpu: a folder that checks a GPU on a machine without a package index, a repository or git."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.measured import ROOT, commit

pytestmark = pytest.mark.ci


def test_a_folder_rehearses_by_itself_and_packs_its_results(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "out"
    subprocess.run([ROOT / "scripts" / "gpu", folder], env={**os.environ, "WHEELS": "no"}, check=True)
    # The machine with the GPU may have no git.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env", "mktemp", "nproc", "realpath", "rm"):
        (tools / name).symlink_to(Path("/usr/bin", name))
    environment = {"PATH": str(tools), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    # Minutes for the first part only.
    ran = subprocess.run(
        [folder / "run", out, "--rehearse", "--minutes", "0.6"],
        env=environment, cwd="/", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"commit: {commit()}" in ran.stdout
    with tarfile.open(out / "results.tgz") as packed:
        names = packed.getnames()
        assert {"page.md", "ceilings.json", "ceilings.log"} <= set(names)
        assert not [name for name in names if name.startswith("models")]
        page = packed.extractfile("page.md")
        assert page is not None
        assert f"- commit: {commit()}" in page.read().decode()
    assert json.loads((out / "ceilings.json").read_text())["outcome"] == "done"


def test_a_folder_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    refused = subprocess.run([ROOT / "scripts" / "gpu", tmp_path], capture_output=True, text=True, check=False)
    assert (refused.returncode, list(tmp_path.iterdir())) == (1, [])
    assert f"{tmp_path} is there already; name a new folder." in refused.stderr
