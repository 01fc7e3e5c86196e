"""`make judges`: only what is new fails, the lists only shrink, and archives are what they are said to be."""

import contextlib
import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from judges import archives, outcomes
from judges.archives import Archive, WrongArchive
from judges.outcomes import FAILED, PASSED, SKIPPED, Known, Outcome, Reason, compare
from judges.page import page
from judges.pytest_suite import Suite, run_suite
from judges.registry import JUDGES
from tables import table

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
KNOWN = Known(1, (Reason("is not served", ("a::1", "a::2")),), (Reason("another family", ("b::1",)),))
AS_LISTED = {"a::1": FAILED, "a::2": FAILED, "b::1": SKIPPED, "c::1": PASSED}


@table(
    "changed, said",
    [
        ({}, {}),
        ({"c::1": FAILED, "c::2": PASSED}, {"new": ["c::1"]}),
        ({"c::2": FAILED}, {"new": ["c::2"]}),
        ({"c::2": SKIPPED}, {"new": ["c::2"]}),
        ({"a::1": SKIPPED}, {"new": ["a::1"]}),
        ({"b::1": FAILED}, {"new": ["b::1"]}),
        ({"a::1": PASSED}, {"mended": ["a::1"]}),
        ({"b::1": PASSED}, {"mended": ["b::1"]}),
        ({"a::1": None}, {"missing": ["a::1"]}),
        ({"b::1": None}, {"missing": ["b::1"]}),
        ({"c::1": None}, {"lost": 1}),
    ],
)
def test_a_run_holds_only_if_it_is_as_listed(changed: dict[str, str | None], said: dict[str, object]) -> None:
    became = {name: result for name, result in {**AS_LISTED, **changed}.items() if result is not None}
    comparison = compare(KNOWN, [Outcome(name, result) for name, result in became.items()])
    found = {
        "new": [one.name for one in comparison.new],
        "mended": list(comparison.mended),
        "missing": list(comparison.missing),
        "lost": comparison.lost,
    }
    assert {name: value for name, value in found.items() if value} == said
    assert comparison.holds is (not said)


def test_two_outcomes_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="Two tests"):
        compare(KNOWN, [Outcome("a::1", PASSED), Outcome("a::1", FAILED)])


def test_a_list_loses_names_and_gets_none(tmp_path: Path) -> None:
    """What passes or is no more goes; what is new is not added."""
    found = [Outcome("a::1", PASSED), Outcome("a::2", FAILED), Outcome("c::1", PASSED), Outcome("c::2", FAILED)]
    comparison = compare(KNOWN, found)
    less = outcomes.shrunk(KNOWN, comparison)
    assert less == Known(2, (Reason("is not served", ("a::2",)),), ())
    assert [one.name for one in compare(less, found).new] == ["c::2"]


@table("name", ["a::b[c]", 'a/b.py::"quoted" \\ back', "b::a::b", "::no group", "c::tab\tand\x7f and\n line", "d::é😀"])
def test_a_list_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    known = Known(3, (Reason('says "why": \\', (name,)),), (Reason("more", ("z::z",)),))
    outcomes.write_known(tmp_path / "known.toml", known)
    assert outcomes.read_known(tmp_path / "known.toml") == known


@table(
    "text, said",
    [
        ('passed = 0\n[[failed]]\nreason = " "\ntests = {a = ["b"]}\n', "has no reason"),
        ('passed = 0\n[[failed]]\nreason = "x"\ntests = {a = ["b", "b"]}\n', "lists twice"),
        (
            'passed = 0\n[[failed]]\nreason = "x"\ntests = {a = ["b"]}\n'
            '[[not_applicable]]\nreason = "y"\ntests = {a = ["b"]}\n',
            "lists twice",
        ),
    ],
)
def test_a_list_that_says_too_little_or_too_much_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        outcomes.read_known(tmp_path / "known.toml")


def test_page_is_of_the_lists() -> None:
    """`make judges` wrote it."""
    assert (ROOT / "docs" / "judges.md").read_text() == page(JUDGES)


def test_every_list_is_of_a_judge() -> None:
    folder = ROOT / "scripts" / "judges" / "known"
    assert {path.stem for path in folder.iterdir()} == {judge.name for judge in JUDGES}


def write_archive(path: Path, *members: tarfile.TarInfo | tuple[str, bytes]) -> Archive:
    """Write an archive of *members*: headers, or names with contents."""
    with tarfile.open(path, "w:gz") as files:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                files.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size = len(member[1])
                files.addfile(header, io.BytesIO(member[1]))
    return Archive("one", path.name, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def stored(tmp_path: Path) -> Archive:
    """An archive that has been fetched."""
    (tmp_path / "archives").mkdir()
    names = ("one-1.0/tests/a.py", "one-1.0/tests/deep/b.py", "one-1.0/tests.txt", "one-1.0/setup.py")
    return write_archive(tmp_path / "archives" / "one-1.0.tar.gz", *((name, name.encode()) for name in names))


def test_only_what_is_wanted_is_unpacked(tmp_path: Path, stored: Archive) -> None:
    folder = archives.take(stored, ("tests", "setup.py"), tmp_path)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert (files, folder.name) == ({"tests/a.py", "tests/deep/b.py", "setup.py"}, "one-1.0")
    (folder / "tests/a.py").write_text("kept")
    assert (archives.take(stored, ("setup.py", "tests"), tmp_path) / "tests/a.py").read_text() == "kept"


def test_what_the_archive_does_not_have_is_an_error(tmp_path: Path, stored: Archive) -> None:
    with pytest.raises(ValueError, match="does not have \\['docs'\\]"):
        archives.take(stored, ("tests", "docs"), tmp_path)


def test_an_archive_of_another_digest_is_refused_and_deleted(tmp_path: Path, stored: Archive) -> None:
    path = tmp_path / "archives" / stored.file
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(WrongArchive, match="has the digest"):
        archives.take(stored, ("tests",), tmp_path)
    assert not path.exists()
    assert not (tmp_path / "unpacked").exists()


@table("name", ["one-1.0/tests/../../../out.py", "/tmp/out.py"])
def test_a_member_that_leads_out_is_refused_or_not_taken(tmp_path: Path, name: str) -> None:
    archive = write_archive(tmp_path / "one-1.0.tar.gz", ("one-1.0/tests/a.py", b""), (name, b""))
    folder = tmp_path / "deep" / "folder"
    with contextlib.suppress(tarfile.FilterError):
        archives.unpack(tmp_path / archive.file, "one-1.0", ["tests"], folder)
    assert not list(tmp_path.rglob("out.py"))


def test_links_are_not_taken(tmp_path: Path) -> None:
    link = tarfile.TarInfo("one-1.0/tests/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    archive = write_archive(tmp_path / "one-1.0.tar.gz", ("one-1.0/tests/a.py", b""), link)
    archives.unpack(tmp_path / archive.file, "one-1.0", ["tests"], tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").rglob("*") if not path.is_dir()] == ["a.py"]


def test_pips_words_name_the_archive() -> None:
    said = """
      Found link https://a.test/one-1.0-py3-none-any.whl#sha256=1 (from https://a.test/one/), version: 1.0
      Found link https://a.test/x/one-1.0.tar.gz#sha256=1 (from https://a.test/one/), version: 1.0
    """
    assert archives.found_link(said, "one-1.0.tar.gz") == "https://a.test/x/one-1.0.tar.gz"
    assert archives.found_link(said, "one-2.0.tar.gz") is None


TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False, "a reason"
def test_is_listed(): assert False
@pytest.fixture
def broken():
    yield
    raise ValueError("at the end")
def test_fails_at_its_end(broken): pass
@pytest.mark.parametrize("x", [1, 2])
def test_skips(x):
    if x == 2:
        pytest.skip("only one")
"""


def test_a_suite_tells_what_became_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text("import no_such_module\n")
    suite = Suite(Path(sys.executable), tmp_path, ("test_a.py", "test_b.py"))
    found = {one.name: one for one in run_suite(suite, {"test_a.py::test_is_listed"})}
    # An import that fails ends the collection, so nothing runs, and the run is a failure, too.
    assert {name for name, one in found.items() if one.became == FAILED} == {"test_b.py::(import)", "::the run"}
    (tmp_path / "test_b.py").unlink()
    found = {
        one.name: one for one in run_suite(Suite(suite.python, tmp_path, ("test_a.py",)), {"test_a.py::test_is_listed"})
    }
    assert {name.removeprefix("test_a.py::"): one.became for name, one in found.items()} == {
        "test_passes": PASSED,
        "test_fails": FAILED,
        "test_is_listed": SKIPPED,
        "test_fails_at_its_end": FAILED,
        "test_skips[1]": PASSED,
        "test_skips[2]": SKIPPED,
    }
    assert "a reason" in found["test_a.py::test_fails"].why


def test_a_suite_without_an_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import time\ndef test_a(): time.sleep(600)\n")
    (only,) = run_suite(Suite(Path(sys.executable), tmp_path, ("test_a.py",)), (), seconds=0.5)
    assert only == Outcome("::the run", FAILED, "no end within 0.5 s")


def test_a_judge_that_does_not_exist_is_named() -> None:
    words = [sys.executable, "-m", "judges", "no-such-judge"]
    done = subprocess.run(words, cwd=ROOT / "scripts", capture_output=True, text=True)
    assert (done.returncode, "there is no no-such-judge" in done.stderr) == (2, True)
