"""Each `saccade` command line of the pages has flags and arguments that the command takes. # F8"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cyclopts import MissingArgumentError
from page_lines import PAGES, Line, lines_of, spans_of

from saccade.cli import vllm_flags
from saccade.cli.main import COMMANDS, make_app

pytestmark = pytest.mark.ci


def is_of_saccade(line: Line) -> bool:
    """Whether *line* calls the program; a block may be text, with apostrophes."""
    return "saccade " in line.text and line.text.count("'") % 2 == 0


def fault(words: list[str], *, is_whole: bool = True) -> str:
    """What the program says about a command line; one in a sentence need not be whole."""
    if words[:1] == ["COMMAND"] or not words:
        return ""
    if words[0] not in COMMANDS:
        return f"there is no command {words[0]}" if words[0][0] != "-" else ""
    if "--config" in words:
        place = words.index("--config")
        words = [*words[:place], *words[place + 2 :]]
    read = vllm_flags.fold_keys(vllm_flags.translate(words).arguments)
    try:
        make_app(None).parse_args(read, exit_on_error=False, print_error=False)
    except MissingArgumentError as error:
        return str(error) if is_whole else ""
    except Exception as error:  # whatever the program would print
        return str(error) or type(error).__name__
    return ""


def calls_in(lines_in: Callable[[Path], Iterable[Line]]) -> list[tuple[Line, list[str]]]:
    """Return the calls in the lines of all pages, each with its words."""
    lines = (line for page in PAGES for line in lines_in(page) if is_of_saccade(line))
    return [(line, words) for line in lines for words in line.calls("saccade")]


def test_a_wrong_line_is_found() -> None:
    for text in ("saccade serve --max-modle-len 4", "saccade raed a.pdf", "a | saccade top > b"):
        [words] = Line(PAGES[0], text).calls("saccade")
        assert fault(words), text
    [words] = Line(PAGES[0], "SACCADE_PORT=1 saccade serve # a comment").calls("saccade")
    assert words == ["serve"]


def test_lines_of_blocks_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_ADMIN_KEY", "of-its-own")  # as in the lines that need one
    calls = calls_in(lines_of)
    assert len(calls) > 80
    assert [f"{line.page.name}: {line.text}: {said}" for line, words in calls if (said := fault(words))] == []


def test_lines_of_sentences_can_be_run() -> None:
    calls = calls_in(spans_of)
    assert len(calls) > 80
    wrong = [
        f"{line.page.name}: {line.text}: {said}" for line, words in calls if (said := fault(words, is_whole=False))
    ]
    assert wrong == []
