"""vLLM's tests of its parsers of answers, whose classes stand in front of Saccade's reader."""

import sys
from collections.abc import Iterable
from pathlib import Path

from judges.archives import take
from judges.judge import Judge
from judges.outcomes import Outcome
from judges.pytest_suite import Suite, run_suite
from judges.suites.vllm_archive import ARCHIVE

ROOM = Path(__file__).parents[1]
TOOL_PARSERS = ("hermes", "qwen3coder", "glm4_moe", "glm47_moe", "gemma4", "kimi_k2")
REASONING = ("qwen3", "kimi_k2", "kimi_k3", "glm4_moe", "gemma4", "deepseekr1")
PARSERS = ("include_reasoning", "streaming", "parse")
ENGINE = ("qwen3", "qwen3_reasoning", "glm47_moe", "gemma4_streaming_reasoning", "ufffd_reasoning_transition", "replay")
TESTS = (
    *(f"tests/tool_parsers/test_{name}_tool_parser.py" for name in TOOL_PARSERS),
    "tests/tool_use/test_kimi_k3_tool_parser.py",
    *(f"tests/reasoning/test_{name}_reasoning_parser.py" for name in REASONING),
    *(f"tests/parser/test_{name}.py" for name in PARSERS),
    *(f"tests/parser/engine/test_{name}.py" for name in ENGINE),
)
SUPPORT = (
    "tests/__init__.py",
    "tests/tool_parsers/__init__.py",
    "tests/tool_parsers/conftest.py",
    "tests/tool_parsers/utils.py",
    "tests/reasoning/__init__.py",
    "tests/reasoning/utils.py",
    "tests/parser/__init__.py",
    "tests/parser/engine/__init__.py",
    "tests/parser/engine/conftest.py",
    "tests/parser/engine/replay_harness.py",
    "tests/parser/engine/streaming_helpers.py",
    "tests/parser/engine/trace_builder.py",
)


def run(cache: Path, skips: frozenset[str]) -> Iterable[Outcome]:
    """Run the tests in Saccade's own environment."""
    folder = take(ARCHIVE, (*TESTS, *SUPPORT), cache)
    options = ("-q", "-p", "vllm_stand_ins", "-p", "no:schemathesis", "--timeout", "60", "-W", "ignore")
    paths = (ROOM / "stand_ins" / "vllm_readers", ROOM / "stand_ins" / "vllm", folder, ROOM.parent)
    return run_suite(
        Suite(Path(sys.executable), folder, TESTS, (*options, "-c", "/dev/null", "--rootdir", str(folder)), {}, paths),
        skips,
    )


SAYS = """\
22 files of tests of parsers: calls of tools, reasoning, both together. vLLM's parser classes are stand-ins that feed
Saccade's reader of answers, with the vocabularies of tiny checkpoints. Left out are other families, and what looks at
the inside of vLLM's parsers."""
JUDGE = Judge("vllm-readers", ARCHIVE.release, SAYS, run)
