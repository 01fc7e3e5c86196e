"""Triton's kernels compile for GPUs as launches specialise them, which needs none, and are as the page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.triton_kernels import CAPABILITIES, MOST_SHARED, Figures, cell, launches
from saccade.nn.backends import triton_draws, triton_experts, triton_kernels

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "triton-kernels.md"
MOST_SPILLED = {
    "packed": 1024,
    "decode": 64,
    "heads": 0,
    "gated": 0,
    "norm": 0,
    "pairs": 0,
    "conv": 0,
    "choice": 0,
    "places": 0,
    "rows": 0,
    "sum": 0,
    "draw": 64,
}
"""Bytes of a thread, by any release of Triton. Heads of 72 channels are not aligned, so a tower's load single numbers."""


def noted() -> tuple[str, dict[tuple[int, str], str]]:
    """The release of Triton that the page names, and its cells by capability and launch."""
    page = PAGE.read_text()
    header, _, *lines = (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|"))
    capabilities = [int(name.removeprefix("sm_")) for name in header[1:]]
    cells = {(capability, name): one for name, *row in lines for capability, one in zip(capabilities, row, strict=True)}
    version = re.search(r"by Triton (\S+) and its ptxas", page)
    assert version is not None
    return version[1], cells


def test_the_page_has_a_row_for_every_launch_and_launches_reach_every_kernel() -> None:
    names = [launch.name for launch in launches()]
    assert set(noted()[1]) == {(capability, name) for capability in CAPABILITIES for name in names}
    kernels = {
        name.removesuffix("_kernel")
        for name in {**vars(triton_kernels), **vars(triton_experts), **vars(triton_draws)}
        if name.endswith("_kernel")
    }
    assert {name.partition(",")[0] for name in names} == kernels == set(MOST_SPILLED)
    assert {launch.name.partition(",")[0] for launch in launches() if launch.is_typical} == kernels


@pytest.mark.ci
@pytest.mark.parametrize(
    ("capability", "options"),
    [(90, ["--few"]), *(pytest.param(one, [], marks=pytest.mark.conformance) for one in CAPABILITIES)],
)
def test_kernels_compile_as_launches_specialise_them(capability: int, options: list[str]) -> None:
    """The bounds are the page's for the release of Triton that it names, and those above for another one."""
    command = [sys.executable, "-m", "benchmarks.triton_kernels", str(capability), "--json", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout)
    of_page, cells = noted()
    wrong = []
    for name, values in found[str(capability)].items():
        figures = values if isinstance(values, str) else Figures(*values)
        if version == of_page and cell(figures) != cells[capability, name]:
            wrong.append(f"{name}: {cell(figures)}, not {cells[capability, name]}")
        elif isinstance(figures, str):
            wrong += [] if version == of_page else [f"{name}: {figures}"]
        elif figures.shared > MOST_SHARED[capability] or figures.spilled > MOST_SPILLED[name.partition(",")[0]]:
            wrong.append(f"{name}: {cell(figures)}")
    assert not wrong, "\n".join(wrong)
