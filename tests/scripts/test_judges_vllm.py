"""The stand-ins of vLLM's modules: its tests can import anything, and its parsers feed Saccade's reader."""

import sys
from pathlib import Path

import pytest
from judges.outcomes import FAILED, PASSED
from judges.pytest_suite import Suite, run_suite

pytestmark = pytest.mark.ci

JUDGES = Path(__file__).parents[2] / "scripts" / "judges"
TESTS = """
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.some.module import Anything, something
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

TEXT = 'Hi <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOKENIZER = get_tokenizer("Qwen/Qwen3-32B")


def test_whole():
    found = Hermes2ProToolParser(TOKENIZER).extract_tool_calls(TEXT, ChatCompletionRequest(messages=[]))
    assert found.content == "Hi"
    assert [(one.function.name, one.function.arguments) for one in found.tool_calls] == [("f", '{"x": 1}')]


def test_pieces():
    parser, before, content, calls = Hermes2ProToolParser(TOKENIZER), "", "", []
    for number in TOKENIZER.encode(TEXT):
        piece = TOKENIZER.decode([number])
        delta = parser.extract_tool_calls_streaming(before, before + piece, piece, [], [], [number], None)
        before += piece
        if delta is not None:
            content += delta.content or ""
            calls += delta.tool_calls
    assert (before, content) == (TEXT, "Hi")
    assert [(one.index, one.function.name) for one in calls] == [(0, "f")]


def test_reasoning():
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")(TOKENIZER)
    assert parser.extract_reasoning("why</think>what", ChatCompletionRequest(messages=[])) == ("why", "what")


def test_what_is_not_here_fails():
    Anything()


def test_another_thing_that_is_not_here_fails():
    something()
"""


def test_parsers_read_answers(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    paths = (JUDGES / "stand_ins" / "vllm_readers", JUDGES / "stand_ins" / "vllm", JUDGES.parent)
    found = run_suite(Suite(Path(sys.executable), tmp_path, ("test_a.py",), ("-p", "vllm_stand_ins"), {}, paths), ())
    assert {one.name.removeprefix("test_a.py::"): one.became for one in found} == {
        "test_whole": PASSED,
        "test_pieces": PASSED,
        "test_reasoning": PASSED,
        "test_what_is_not_here_fails": FAILED,
        "test_another_thing_that_is_not_here_fails": FAILED,
    }, found
