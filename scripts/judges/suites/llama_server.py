"""llama.cpp's tests of its server, sent to Saccade's."""

from collections.abc import Iterable
from pathlib import Path

from judges.archives import take
from judges.environments import environment
from judges.judge import Judge
from judges.outcomes import Outcome
from judges.pytest_suite import Suite, run_suite
from judges.servers import Server, bundled_server
from judges.suites.llama_archive import ARCHIVE, ROOT

PACKAGES = (
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "filelock==3.20.0",
    "numpy==2.4.0",
    "openai==2.14.0",
    "prometheus-client==0.24.0",
    "requests==2.32.5",
    "pillow==12.3.0",
)
FOLDER = f"{ROOT}/tools/server/tests"
TESTS = tuple(
    f"unit/test_{name}.py"
    for name in (
        "basic",
        "chat_completion",
        "compat_anthropic",
        "compat_oai_responses",
        "completion",
        "ignore_eos",
        "metrics",
        "stream",
        "template",
        "tokenize",
        "tool_call",
        "vision_api",
    )
)
WITH_KEY = ("unit/test_security.py",)
MODELS = ("llama-2", "tinyllama-2", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "test", "davinci-002")
KEY = "sk-this-is-the-secret-key"
STAND_INS = Path(__file__).parents[1] / "stand_ins" / "llama"


def run(cache: Path, skips: frozenset[str]) -> Iterable[Outcome]:
    """Run the tests against a server without a key, and those of keys against one that wants theirs."""
    python = environment("llama-server", PACKAGES, cache)
    folder = take(ARCHIVE, (FOLDER,), cache) / FOLDER
    with bundled_server(MODELS) as server:
        yield from run_suite(_suite(python, folder, TESTS, server), skips, 450)
    with bundled_server(MODELS, "--api-key", KEY, key=KEY) as server:
        yield from run_suite(_suite(python, folder, WITH_KEY, server), skips, 60)


def _suite(python: Path, folder: Path, tests: Iterable[str], server: Server) -> Suite:
    external = {"DEBUG_EXTERNAL": "1", "PORT": str(server.port)}
    options = ("-q", "-p", "llama_paths", "--timeout", "30", "-W", "ignore")
    return Suite(python, folder, tuple(tests), options, external, (STAND_INS, folder))


SAYS = """\
The vendored tests of llama-server run against the bundled model: chats, completions, Messages, Responses, tokenisation,
metrics, tools, vision and API keys. Left out are the tests of what the server does not have: slots, LoRA adapters,
embeddings, ranking, infilling, routers of models, its own tools."""
JUDGE = Judge("llama-server", ARCHIVE.release, SAYS, run)
