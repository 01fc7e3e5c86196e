"""`scripts/install` asks pip before it fetches gigabytes. Its Python here is a script that notes what it is told."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$(dirname "$0")/../said"
while [ $# -gt 0 ]; do
    if [ "$1" = --report ]; then echo "$REPORT" > "$2"; fi
    shift
done
"""
FOR_CPU = '{"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "sympy"}}]}'
FOR_CUDA = '{"install": [{"metadata": {"name": "torch"}}, {"metadata": {"name": "nvidia-cublas"}}]}'


def install(
    folder: Path, report: str, *arguments: str, device: str = "null", flags: str = "sse2", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script on a machine with *device* and a processor with *flags*; return what pip was told, too."""
    (folder / "bin").mkdir()
    (folder / "dev").mkdir()
    (folder / "dev" / device).touch()
    (folder / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": "true",
        "VENV": str(folder),
        "REPORT": report,
        "DEVICES": str(folder / "dev"),
        "CPUINFO": str(folder / "cpuinfo"),
        **variables,
    }
    done = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=60)
    return done, (folder / "said").read_text().splitlines()


def test_a_machine_without_a_driver_refuses_the_build_for_cuda(tmp_path: Path) -> None:
    done, said = install(tmp_path, FOR_CUDA)
    assert done.returncode == 1
    assert done.stderr.startswith("pip would fetch torch's build for CUDA, almost 6 GB")
    assert "TORCH_INDEX_URL" in done.stderr
    assert len(said) == 1
    assert "--dry-run" in said[0]


def test_the_build_for_cuda_can_be_asked_for(tmp_path: Path) -> None:
    done, said = install(tmp_path, FOR_CUDA, SACCADE_CUDA="1")
    assert done.returncode == 0
    assert not [line for line in said if "--dry-run" in line]


def test_a_machine_with_a_driver_is_not_asked(tmp_path: Path) -> None:
    done, said = install(tmp_path, FOR_CUDA, device="nvidia0")
    assert done.returncode == 0
    assert not [line for line in said if "--dry-run" in line]


def test_the_index_for_torch_is_asked_and_used(tmp_path: Path) -> None:
    done, said = install(tmp_path, FOR_CPU, TORCH_INDEX_URL="file:///index")
    assert done.returncode == 0, done.stderr
    assert "MB" in done.stdout
    assert ["file:///index" in line for line in said] == [True, True, False]
    assert said[-1].endswith("--editable .[engine]")


def test_amx_brings_the_kernels_for_it(tmp_path: Path) -> None:
    _, said = install(tmp_path, FOR_CPU, "docs", flags="amx_tile")
    assert said[-1].endswith("--editable .[engine,docs,cpu]")
