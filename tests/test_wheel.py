"""The wheel has all that the package needs, and works in an environment without the source tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy, since a build leaves files in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    offline = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *offline, "--wheel-dir", str(folder), str(tree)]
    subprocess.run(command, check=True, timeout=300)
    return folder / f"saccade_vlm-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`saccade` of an environment that has the wheel, and the dependencies of this one without its source tree."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=300)
    return folder / "bin" / "saccade"


def output(program: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(program), *arguments], cwd=program.parent, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Bundled model, page, flags of vLLM, protocols, py.typed. READMEs of model families are parts of a page."""
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "saccade").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    pages = {name for name in source if name.startswith("saccade/models/") and name.endswith("README.md")}
    assert pages
    assert source - pages - set(zipfile.ZipFile(wheel).namelist()) == set()
    assert {"saccade/py.typed", "saccade/cli/vllm_flags.toml"} <= source


def test_program_of_the_wheel_says_its_version(program: Path) -> None:
    assert output(program, "--version").strip() == VERSION


def test_program_of_the_wheel_answers_with_the_bundled_model(program: Path) -> None:
    assert "What does it say? " in output(program, "demo")
