"""The environment of a client's program: what its first comment block names, in a folder of its own.

The block has the form of Python's inline script metadata: `dependencies` between `/// script` and `///`. In a program
of Node's, its lines begin with `//`. Packages in `alone` are installed without what they depend on, such as a client
whose package also has models for GPUs.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
NODE_MODULES = (Path(__file__).parent / "agent_task.mjs",)
"""What programs of Node's import, besides their packages."""

_BLOCK = re.compile(r"^(?P<sign>#|//) /// script\n(?P<lines>(?:(?P=sign)(?: .*)?\n)+?)(?P=sign) ///$", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A client's program and the packages that it needs, each with its version."""

    path: Path
    dependencies: tuple[str, ...]
    alone: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return self.path.stem

    @property
    def is_node(self) -> bool:
        """Whether Node runs it."""
        return self.path.suffix == ".mjs"


def read_program(path: Path) -> Program:
    """Read what the program needs. Raises ValueError for a program that does not say it."""
    found = _BLOCK.search(path.read_text())
    if found is None:
        raise ValueError(f"{path} has no block `/// script` with its dependencies.")
    lines = found["lines"].splitlines()
    settings = tomllib.loads("\n".join(line.removeprefix(found["sign"]).strip() for line in lines))
    return Program(path, tuple(settings["dependencies"]), tuple(settings.get("alone", ())))


def programs() -> list[Program]:
    """All programs, by name."""
    return [read_program(path) for path in sorted(PROGRAMS.iterdir()) if path.suffix in (".py", ".mjs")]


def command(program: Program, cache: Path) -> list[str]:
    """Install what the program needs below *cache*, unless it is there, and return the command that runs it.

    Raises CalledProcessError where a package cannot be installed.
    """
    folder = cache.resolve() / program.name
    installed = folder / "installed"
    wanted = "\n".join((*program.dependencies, *program.alone))
    if not installed.exists() or installed.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        _install_node(program, folder) if program.is_node else _install_python(program, folder)
        installed.write_text(wanted)
    if not program.is_node:
        # -P: a program may have its client's name, and must not be found instead of it.
        return [str(folder / "bin/python"), "-P", str(program.path)]
    # Node looks for packages and modules from the program's own folder upwards.
    for path in (program.path, *NODE_MODULES):
        shutil.copyfile(path, folder / path.name)
    return ["node", str(folder / program.path.name)]


def _install_python(program: Program, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *program.dependencies], check=True)
    if program.alone:
        subprocess.run([*pip, "install", "--no-deps", *program.alone], check=True)


def _install_node(program: Program, folder: Path) -> None:
    flags = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run(["npm", "install", *flags, *program.dependencies], check=True)
