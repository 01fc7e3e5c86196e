"""Links between the pages lead somewhere."""

import re
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_to_a_page_and_its_heading() -> None:
    broken = []
    for page in (*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(PROJECT)}: {link}")
    assert broken == []
