"""The image's steps work on what its build context has, and the Dockerfile keeps what docs/deploy.md promises.

No image is built here. `deploy/docker/install` is run as the Dockerfile runs it. It finds this environment's packages
installed, so it fetches nothing. The steps that need root, and the base images, are not run.
"""

import asyncio
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import echo_worker
import pytest
import scripted
from kustomize import render

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
INSTRUCTIONS = re.findall(
    r"^([A-Z]+) (.+)$", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", ""), re.MULTILINE
)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What .dockerignore lets into the build."""
    folder = tmp_path_factory.mktemp("context")
    lines = [line for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] != "#"]
    assert lines[0] == "*"
    ignored = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    for line in lines:
        source, target = ROOT / line[1:], folder / line[1:]
        if line.startswith("!") and source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        elif line.startswith("!"):
            shutil.copy(source, target)
    return folder


def test_install_makes_an_environment_without_an_installer(context: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("pip", "saccade", "__editable__")):
            (installed / entry.name).symlink_to(entry)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(installed),
        "EXTRA": "cpu",
        "PIP_NO_INDEX": "1",
        "PIP_NO_COMPILE": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # in an environment variable, 0 means none
    }
    made = tmp_path / "saccade"
    command = [str(context / "deploy" / "docker" / "install"), str(made)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == VERSION
    packages = next((made / "lib").glob("python3.*")) / "site-packages"
    assert (packages / "saccade" / "py.typed").is_file()  # not a link to the checkout
    assert not (packages / "pip").exists()
    assert (made / "model" / "config.json").is_file()
    assert (made / "healthcheck.py").is_file()


def test_stages_leave_neither_root_nor_a_compiler() -> None:
    """Only the target that is named for its compiler has one."""
    names = [value.split(" AS ")[1] for name, value in INSTRUCTIONS if name == "FROM" and " AS " in value]
    images = [value.split()[0] for name, value in INSTRUCTIONS if name == "FROM"]
    assert [one for one in images if one not in names and "$" not in one] == [
        "python:3.12-slim",
        "nvidia/cuda:13.0.1-base-ubuntu24.04",
    ]
    stage, compilers = "", []
    for name, value in INSTRUCTIONS:
        if name == "FROM":
            stage = value.split(" AS ")[-1]
        elif "gcc" in value or "build-essential" in value:
            compilers.append(stage)
    assert compilers == ["cuda-triton-runtime"]
    last = dict(INSTRUCTIONS[max(i for i, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM") :])
    assert last["FROM"] == "${TARGET}-runtime"
    assert last["ENTRYPOINT"] == '["saccade"]'
    assert "healthcheck.py" in last["HEALTHCHECK"]


def test_the_image_is_that_of_the_manifests() -> None:
    (user,) = (value for name, value in INSTRUCTIONS if name == "USER")
    for (kind, _), manifest in render(ROOT / "deploy" / "kubernetes" / "base").items():
        if kind == "Deployment":
            pod = manifest["spec"]["template"]["spec"]
            assert user.split(":")[0] == str(pod["securityContext"]["runAsUser"])
            assert pod["containers"][0]["image"] == f"saccade:{VERSION}"
    assert f"-t saccade:{VERSION} ." in DOCKERFILE


def exit_code(address: str) -> int:
    return subprocess.run([sys.executable, str(FOLDER / "healthcheck.py"), address], check=False, timeout=60).returncode


def test_healthcheck_of_a_gateway(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl) as gateway:
        address = f"http://127.0.0.1:{gateway.port}"
        assert exit_code(address) == 0
        gateway.worker.become(ready=False)
        assert exit_code(address) == 1
    assert exit_code(address) == 1


@pytest.fixture
async def worker_address(tmp_path: Path) -> AsyncIterator[str]:
    async with echo_worker.serving(tmp_path):
        yield f"unix:{tmp_path}/w.sock"


async def test_healthcheck_of_a_worker(worker_address: str, tmp_path: Path) -> None:
    assert await asyncio.to_thread(exit_code, worker_address) == 0
    assert await asyncio.to_thread(exit_code, f"unix:{tmp_path}/none.sock") == 1
