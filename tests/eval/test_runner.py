"""How many things are asked at a time, and what a file of results keeps."""

import asyncio
import os
from pathlib import Path

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.eval.runner import Journal, run_all


async def test_as_many_at_a_time_as_wanted() -> None:
    barrier, answers, num_open = asyncio.Barrier(3), [], [0]

    async def ask(item: int) -> None:
        num_open[0] += 1
        assert num_open[0] <= 3
        await barrier.wait()  # for two others: with fewer at a time it would wait for ever
        num_open[0] -= 1
        answers.append(item)

    await run_all(range(9), ask, 3)
    assert sorted(answers) == list(range(9))


@table("content", ["a", "a\n", '{"other": 1}\n', '["name"]\n', '{"name": "a"}\n{"'])
def test_a_foreign_file_stays_as_it_is(content: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(content)
    with pytest.raises(StartupError, match="line 1, is no result"):
        Journal(file, lambda line: line["name"], lambda line: bool(line["good"]))
    assert file.read_text() == content


def test_a_result_that_has_no_room_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    journal = Journal(file, lambda line: line["name"], lambda line: True)
    (number,) = (int(one.name) for one in Path("/proc/self/fd").iterdir() if one.resolve() == file)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), number)
    with pytest.raises(StartupError, match=r"Cannot write .*j\.jsonl: No space left on device\."):
        journal.add_result({"name": "a"})
    journal.close()


def test_a_journal_without_results_leaves_no_file_that_it_has_made(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    for is_there in (False, True):
        if is_there:
            file.touch()
        Journal(file, lambda line: line["name"], lambda line: line["good"]).close()
        assert file.exists() is is_there


def test_a_journal_drops_what_is_not_good(tmp_path: Path) -> None:
    def journal() -> Journal:
        return Journal(tmp_path / "j.jsonl", lambda line: line["name"], lambda line: line["good"])

    first = journal()
    for name, good in (("a", True), ("b", False), ("c", True)):
        first.add_result({"name": name, "good": good})
    first.close()
    second = journal()
    assert list(second.results) == ["a", "c"]
    second.add_result({"name": "b", "good": True})
    second.close()
    assert (tmp_path / "j.jsonl").read_text().count("\n") == 3
    assert not (tmp_path / "j.jsonl.new").exists()
