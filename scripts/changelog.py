"""Move the sentences of changelog.d into CHANGELOG.md: `python scripts/changelog.py`, when a release is made.

The section is that of pyproject.toml's version. If it exists, the sentences join its lists, and its date becomes today's.
A sentence that says what no longer happens is listed under Fixed, others under Added. The fragments are deleted. Read the
result: a list may have other headings, which the next run keeps.
"""

import datetime
import re
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIX = re.compile(r"\bno longer\b|; before, ")
RELEASE = re.compile(r"^## (\S+) \((\S+)\)\n", re.MULTILINE)


def items_of(section: str) -> dict[str, list[str]]:
    """Return the list items under each heading of *section*, the text below a release's heading."""
    lists = re.findall(r"^### ([^\n]+)\n+(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL)
    return {
        heading: [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]
        for heading, text in lists
    }


def released(changelog: str, version: str, date: str, sentences: list[str]) -> str:
    """Return *changelog* with *sentences* in the section of *version*, which is made if it is missing."""
    releases = RELEASE.split(changelog)  # the introduction, then version, date and text of each release
    introduction, older = releases[0], releases[1:]
    items: dict[str, list[str]] = {"Added": [], "Fixed": []}
    if older and older[0] == version:
        items |= items_of(older[2])
        older = older[3:]
    for sentence in sentences:
        items["Fixed" if FIX.search(sentence) else "Added"].append(sentence)
    items["Fixed"] = items.pop("Fixed")  # the last list
    lists = [
        f"### {heading}\n\n" + "\n".join(map(_wrapped, items[heading])) + "\n" for heading in items if items[heading]
    ]
    rest = "".join(f"## {older[i]} ({older[i + 1]})\n{older[i + 2]}" for i in range(0, len(older), 3))
    section = f"## {version} ({date})\n\n" + "\n".join(lists)
    return f"{introduction}{section}" + (f"\n{rest}" if rest else "")


def _wrapped(item: str) -> str:
    return textwrap.fill(
        item, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def main(root: Path = ROOT) -> None:
    """Rewrite CHANGELOG.md of *root* and delete the fragments."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    fragments = sorted((root / "changelog.d").glob("*.md"))
    sentences = [" ".join(fragment.read_text().split()) for fragment in fragments]
    changelog = root / "CHANGELOG.md"
    changelog.write_text(released(changelog.read_text(), version, str(datetime.date.today()), sentences))
    for fragment in fragments:
        fragment.unlink()


if __name__ == "__main__":
    main()
