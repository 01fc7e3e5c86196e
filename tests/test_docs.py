"""Links between the pages lead somewhere, the site's menu has every page, and what pages name exists."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.guard

PROJECT = Path(__file__).parents[1]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return anchors_of(page.read_text())


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings in *text*."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
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


def pages_of(entry: object) -> Iterator[str]:
    """The pages below an *entry* of the menu."""
    match entry:
        case str():
            yield entry
        case list():
            for item in entry:
                yield from pages_of(item)
        case dict():
            yield from pages_of(list(entry.values()))


def test_the_menu_of_the_site_names_every_page_once() -> None:
    menu = sorted(pages_of(yaml.safe_load((PROJECT / "mkdocs.yml").read_text())["nav"]))
    assert menu == sorted(str(page.relative_to(PROJECT / "docs")) for page in (PROJECT / "docs").rglob("*.md"))


def test_a_page_of_the_site_links_to_no_file_outside_of_it() -> None:
    """Such a link works in the repository and leads nowhere on the site."""
    outside = [
        f"{page.name}: {link}"
        for page in (PROJECT / "docs").rglob("*.md")
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / link).resolve().is_relative_to(PROJECT / "docs")
    ]
    assert outside == []


def test_lines_of_prose_fit_a_terminal() -> None:
    """120 characters, code in a line not counted; tables, programs, decisions and what families say of themselves apart."""
    pages = [*PROJECT.glob("*.md"), *(PROJECT / "docs").glob("*.md"), *(PROJECT / "docs" / "api").glob("*.md")]
    long = []
    for page in pages:
        if page == PROJECT / "docs" / "models.md":
            continue
        text = re.sub(
            r"^( *)```.*?^\1```", lambda fence: "\n" * fence[0].count("\n"), page.read_text(), flags=re.M | re.S
        )
        for number, line in enumerate(text.splitlines(), 1):
            if not line.startswith(("|", "    ")) and len(re.sub(r"`[^`]*`", "", line)) > 120:
                long.append(f"{page.name}:{number}")
    assert long == []


NO_PAGES_OF_OURS = ("CHANGELOG.md", "changelog.d/", "benchmarks/results/", "docs/from-vllm.md", "tests/")
"""What they name may be gone, or belong to others."""

FILE_NAME = re.compile(r"`([\w./-]+\.(?:py|toml|ya?ml|sh|proto))(?:::\w+)?`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
FLAGS_OF_OTHERS = {
    "--apikey", "--baseurl", "--build", "--build-arg", "--data-binary", "--dbname", "--detach", "--enable-trace",
    "--exit-on-error", "--file", "--format", "--from-file", "--grpc-mode", "--images-per-request", "--init",
    "--metrics-key", "--modelid", "--no-owner", "--output", "--owner", "--property", "--provider", "--pwprompt",
    "--rm", "--smg-grpc-mode", "--unit", "--vl",
}  # fmt: skip
"""Of programs beside Saccade that the pages show: curl, docker, PostgreSQL, systemd-run, agents and peers."""


def files_of_project(*patterns: str) -> list[str]:
    """The names of the project's files, those that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    return subprocess.run(listed, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.split()


def pages_about_saccade() -> Iterator[tuple[str, str]]:
    """The name and the text of each page whose sentences are about what is here now."""
    for name in files_of_project("*.md"):
        if not name.startswith(NO_PAGES_OF_OURS) and (PROJECT / name).exists():
            yield name, (PROJECT / name).read_text()


def test_files_that_pages_name_exist() -> None:
    names = files_of_project()
    ends = {"/".join(parts[start:]) for parts in (name.split("/") for name in names) for start in range(len(parts))}
    gone = [
        f"{page}: {name}"
        for page, text in pages_about_saccade()
        for name in FILE_NAME.findall(text)
        if name not in ends
    ]
    assert gone == []


def test_flags_that_pages_name_exist() -> None:
    """A flag is in the reference of flags, or in a program or manifest of the project."""
    programs = files_of_project(
        "src/*.py", "scripts/*", "benchmarks/*.py", "tests/*.py", "deploy/*", ".ci/*", "Makefile"
    )
    texts = [(PROJECT / name).read_text(errors="replace") for name in programs if (PROJECT / name).exists()]
    reference = (PROJECT / "docs" / "configuration.md").read_text()
    known = {flag for text in (*texts, reference) for flag in FLAG.findall(text)} | FLAGS_OF_OTHERS
    gone = [
        f"{page}: {flag}"
        for page, text in pages_about_saccade()
        for flag in FLAG.findall(text)
        if not {flag, flag.replace("--no-", "--")} & known
    ]
    assert gone == []


DOTTED_NAME = re.compile(r"(?<![\w./-])(?:saccade\.)?([a-z_]\w*(?:\.[a-z_]\w*)+)(?![\w/(])")
DOTTED_NAMES_OF_OTHERS = {
    "chat.completion",
    "chat.completion.chunk",
    "server.url",
    "tenants.acme",
    "tokenspeed.grpc.scheduler",
}
"""Of the wire, of a file's keys and of peers."""


def dotted_names(source: str) -> Iterator[str]:
    """The dotted names in the docstrings of a module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from (name for name in DOTTED_NAME.findall(text) if not name.endswith(".py"))


def test_modules_that_docstrings_name_exist() -> None:
    """A dotted name that begins with a package of ours is a module, or a name that a module's text has."""
    root = PROJECT / "src" / "saccade"
    texts = {path.relative_to(root).with_suffix("").parts: path.read_text() for path in root.rglob("*.py")}
    packages = {part for path in texts for part in path[:-1]}
    texts |= {path[:-1]: text for path, text in texts.items() if path[-1] == "__init__"}
    ends = {path[start:]: text for path, text in texts.items() for start in range(len(path))}
    gone = [
        f"{'/'.join(path)}: {name}"
        for path, text in texts.items()
        for name in dotted_names(text)
        if (parts := tuple(name.split(".")))[0] in packages and name not in DOTTED_NAMES_OF_OTHERS
        if parts not in ends and parts[-1] not in ends.get(parts[:-1], "")
    ]
    assert gone == []


def test_decisions_are_numbered_without_holes_but_those_that_are_named() -> None:
    numbers = {int(page.name[:3]) for page in (PROJECT / "docs" / "decisions").glob("*.md")}
    architecture = " ".join((PROJECT / "docs" / "architecture.md").read_text().split())
    (named,) = re.findall(r"Decisions ([\d, and]+) are not there", architecture)
    assert set(range(1, max(numbers) + 1)) - numbers == set(map(int, re.findall(r"\d+", named)))


def section(page: Path, anchor: str) -> str:
    """The heading that *anchor* names, with the text up to the next heading."""
    parts = re.split(r"^(?=#+ )", page.read_text(), flags=re.MULTILINE)
    return next(part for part in parts if anchor in anchors_of(part))


def test_figures_of_the_readme_are_those_of_the_pages_that_it_names() -> None:
    why = (PROJECT / "README.md").read_text().partition("## Why")[2].partition("\n## ")[0]
    claims = re.findall(r"([^[\]]*)\(\[(?:figures|siege)\]\((docs/[\w-]+\.md)#([\w-]+)\)\)", why)
    assert len(claims) == 4
    for text, page, anchor in claims:
        evidence = section(PROJECT / page, anchor)
        for number in re.findall(r"(?<!\w)\d+(?:\.\d+)?(?!B)", text):
            assert re.search(rf"(?<![\d.]){re.escape(number)}", evidence), (number, page, anchor)


def rows_with_tests(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The first cell, and the tests, of each row of the tables whose last column is `test`."""
    for table in re.findall(r"^\|.*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
        for row in table.splitlines():
            cells = row.strip("|").split("|")
            yield cells[0].strip(), re.findall(r"`(test_\w+\.py::test_\w+)`", cells[-1])


def test_each_attack_and_each_bound_has_a_test_that_exists() -> None:
    """One table has all attacks of clients; the pages on tenants, reliability and media lead to it."""
    sources: dict[str, str] = {}
    for path in (PROJECT / "tests").rglob("test_*.py"):
        sources[path.name] = sources.get(path.name, "") + path.read_text()
    rows = list(rows_with_tests(PROJECT / "docs" / "security.md"))
    assert len(rows) > 40
    assert [row for row, tests in rows if not tests] == []
    named = {test for _, tests in rows for test in tests}
    missing = [
        test for test in named if f"def {test.partition('::')[2]}(" not in sources.get(test.partition("::")[0], "")
    ]
    assert missing == []
    for page in ("tenants", "reliability", "media"):
        assert "(security.md#a-client)" in (PROJECT / "docs" / f"{page}.md").read_text()
