"""Tests for what FlashInfer and DeepGEMM compile with."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from saccade.nn.backends import compilers
from saccade.nn.backends.compilers import (
    EXPERTS,
    FA3_HEADER,
    GEMM_HEADER,
    Toolkit,
    build_of,
    compilation,
    find_toolkit,
    no_cuda_compiler,
    use_toolkit,
)


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit of nvcc and CUDA's runtime, which is nowhere but in its own place; ninja is on the search path."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    monkeypatch.setattr(compilers, "TOOLKIT", tmp_path / "cuda")
    monkeypatch.setattr("shutil.which", lambda name: {"ninja": "/usr/bin/ninja"}.get(name))
    monkeypatch.setattr(compilers, "find_spec", lambda _: None)
    return tmp_path / "cuda"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the headers that torch's packages bring."""
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(compilers, "find_spec", {"nvidia": spec}.get)
    folder = tmp_path / "nvidia" / "cu13" / "include"
    folder.mkdir(parents=True)
    for name in (FA3_HEADER, GEMM_HEADER):
        (folder / name).touch()
    return folder


def test_headers_that_the_toolkit_lacks_are_found_in_torchs_packages(toolkit: Path, packages: Path) -> None:
    found = find_toolkit()
    headers = {FA3_HEADER: packages, GEMM_HEADER: packages}
    assert found == Toolkit(toolkit / "bin" / "nvcc", toolkit, Path("/usr/bin/ninja"), headers)
    assert no_cuda_compiler(FA3_HEADER) is None


def test_a_header_that_is_nowhere_is_named_for_the_kernels_that_include_it(toolkit: Path) -> None:
    assert no_cuda_compiler() is None
    reason = no_cuda_compiler(FA3_HEADER)
    assert "finds no curand_kernel.h: install cuRAND's headers (nvidia-curand)" in (reason or "")


def test_a_toolkit_with_all_headers_is_enough(toolkit: Path, packages: Path) -> None:
    for name in (FA3_HEADER, GEMM_HEADER):
        (toolkit / "include" / name).touch()
    environment: dict[str, str] = {}
    use_toolkit(find_toolkit(), environment)
    assert environment == {"CUDA_HOME": str(toolkit)}


def test_deepgemm_finds_a_toolkit_that_no_variable_names(toolkit: Path, packages: Path) -> None:
    """It looks in CUDA_HOME and in PATH alone."""
    environment: dict[str, str] = {}
    use_toolkit(find_toolkit(), environment)
    assert environment == {"CUDA_HOME": str(toolkit), "CPLUS_INCLUDE_PATH": str(packages)}
    use_toolkit(find_toolkit(), environment)
    assert environment["CPLUS_INCLUDE_PATH"] == str(packages)


def test_what_a_person_has_set_stays(toolkit: Path, packages: Path) -> None:
    environment = {"CUDA_HOME": "/opt/cuda", "CPLUS_INCLUDE_PATH": "/opt/include"}
    use_toolkit(find_toolkit(), environment)
    assert environment == {"CUDA_HOME": "/opt/cuda", "CPLUS_INCLUDE_PATH": f"/opt/include:{packages}"}


def test_modules_among_flashinfers_own_files_need_no_compiler(
    tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer loads them without nvcc and ninja, and looks there first."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "empty"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    spec = ModuleSpec("flashinfer", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "flashinfer")]
    monkeypatch.setattr(compilers, "find_spec", {"flashinfer": spec}.get)
    assert "finds no ninja" in (no_cuda_compiler() or "")
    for module, builds_experts in (("some_attention", True), (EXPERTS.module, False)):
        file = tmp_path / "flashinfer" / "data" / "aot" / module / f"{module}.so"
        file.parent.mkdir(parents=True)
        file.touch()
        assert (no_cuda_compiler(FA3_HEADER), compilation()) == (None, None)
        assert (build_of(EXPERTS) is not None) == builds_experts
