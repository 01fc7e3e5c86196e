"""Source archives of releases: found by pip's own configuration, checked by digest, never built.

`pip download` prepares a source archive's metadata, which runs its build and fails without the build's packages. Only
files are wanted here, so pip tells where the archive is, and this module takes it.
"""

import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SECONDS = 300
CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A release's source archive: the project, the file's name, and its SHA-256 in hexadecimal."""

    project: str
    file: str
    sha256: str

    @property
    def release(self) -> str:
        """The folder that the archive has everything in, such as openai-3.3.1."""
        return self.file.removesuffix(".tar.gz")

    @property
    def version(self) -> str:
        """The release's version."""
        return self.release.rpartition("-")[2]


class WrongArchive(Exception):
    """The archive is not to be had, or is not the one whose digest is written down."""


def take(archive: Archive, members: Iterable[str], cache: Path) -> Path:
    """Return the folder of the release with *members*: files, or folders with all that is below them.

    A member's path is relative to that folder. It is unpacked once: again only if other members are wanted. Raises
    WrongArchive, and ValueError for a member that the archive does not have.
    """
    wanted = sorted(members)
    folder = cache / "unpacked" / hashlib.sha256("\n".join([archive.sha256, *wanted]).encode()).hexdigest()[:16]
    if not (folder / ".whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        unpack(fetch(archive, cache / "archives"), archive.release, wanted, folder)
        (folder / ".whole").touch()
    return folder / archive.release


def unpack(path: Path, root: str, members: Iterable[str], folder: Path) -> None:
    """Unpack *members* below the archive's folder *root* into *folder*; links and paths that lead out raise."""
    missing = set(members)
    with tarfile.open(path) as files:
        for member in files:
            inner = member.name.removeprefix(f"{root}/")
            for wanted in members:
                if inner == wanted or inner.startswith(f"{wanted}/"):
                    missing.discard(wanted)
                    if member.isfile():
                        files.extract(member, folder, filter="data")
    if missing:
        raise ValueError(f"{path.name} does not have {sorted(missing)}.")


def fetch(archive: Archive, folder: Path) -> Path:
    """Return the archive's path in *folder*, after a download unless it is there. Raises WrongArchive."""
    path = folder / archive.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        answer = urllib.request.urlopen(find(archive), timeout=SECONDS, context=_context())
        with answer, partial.open("wb") as target:
            shutil.copyfileobj(answer, target, CHUNK)
        partial.rename(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != archive.sha256:
        path.unlink()
        raise WrongArchive(f"{archive.file} has the digest {digest}, not {archive.sha256}.")
    return path


def find(archive: Archive) -> str:
    """The archive's address, as pip finds it by its own configuration. Raises WrongArchive if there is none."""
    words = [sys.executable, "-m", "pip", "index", "versions", archive.project, "-vv", "--no-color"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    found = found_link(done.stdout + done.stderr, archive.file)
    if found is None:
        raise WrongArchive(f"pip finds no {archive.file}.")
    return found


def found_link(said: str, file: str) -> str | None:
    """The address of *file* among the links that pip *said* it found."""
    for link in re.findall(r"Found link (\S+)", said):
        address = str(link).partition("#")[0]
        if address.rpartition("/")[2] == file:
            return address
    return None


def _context() -> ssl.SSLContext:
    """Certificates that pip is told to trust by its variable, besides the system's."""
    return ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
