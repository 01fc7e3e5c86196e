"""Stop a release that lacks what only the owner knows: `python scripts/release_ready.py TAG`.

The blanks are in release/owner.toml. What is in them agrees with pyproject.toml, and TAG with its version.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLANKS = ("repository", "tags", "contact", "pypi_project")


def faults_of(owner: dict[str, object], project: dict[str, object], tag: str) -> Iterator[str]:
    """Yield a sentence for each reason not to release *project*, the table of pyproject.toml, as *tag*."""
    blank = [name for name in BLANKS if not str(owner.get(name, "")).strip()]
    if blank:
        yield f"Fill in release/owner.toml, whose comments say what each line is for: {', '.join(blank)}."
        return
    urls = {"Repository": owner["repository"], "Releases": owner["tags"]}
    if project.get("urls") != urls:
        lines = " and ".join(f'{name} = "{url}"' for name, url in urls.items())
        yield f"Write [project.urls] into pyproject.toml, as release/owner.toml says: {lines}."
    if owner["pypi_project"] != project["name"]:
        yield f"Give pypi_project in release/owner.toml the name in pyproject.toml, {project['name']}, or change both."
    if tag != f"v{project['version']}":
        yield f"Tag the release v{project['version']}, the version in pyproject.toml, not {tag}."


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Print what stops the release of *root*; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", metavar="TAG", help="v and the version")
    tag = parser.parse_args(arguments).tag
    owner = tomllib.loads((root / "release" / "owner.toml").read_text())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    faults = list(faults_of(owner, project, tag))
    print("\n".join(faults) or f"{tag} can be released.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
