"""openai-python's tests of resources, sent to a server instead of their mock; strict types judge the answers' shapes."""

from collections.abc import Iterable
from pathlib import Path

from judges.archives import Archive, take
from judges.environments import environment
from judges.judge import Judge
from judges.outcomes import Outcome
from judges.pytest_suite import Suite, run_suite
from judges.servers import bundled_server

ARCHIVE = Archive("openai", "openai-3.3.1.tar.gz", "6f22807de1a976c932cecda620e8172a8c3fdbaeed29c7f21564e0c2410edf56")
PACKAGES = (
    "openai[aiohttp]==3.3.1",
    "pytest==9.2.0",
    "pytest-asyncio==1.5.0",
    "pytest-timeout==2.4.0",
    "rich==15.0.0",
    "respx==0.23.1",
)
MODELS = ("gpt-3.5-turbo-instruct", "gpt-4o", "gpt-4o-mini", "gpt-5.1", "gpt-5.4", "gpt-5.6-sol", "model")
"""What its requests call the model."""
FOLDER = "tests/api_resources"
TESTS = (
    f"{FOLDER}/chat",
    f"{FOLDER}/responses",
    f"{FOLDER}/test_completions.py",
    f"{FOLDER}/test_files.py",
    f"{FOLDER}/test_models.py",
    f"{FOLDER}/test_responses.py",
)


def run(cache: Path, skips: frozenset[str]) -> Iterable[Outcome]:
    """Run the five resources that Saccade has."""
    python = environment("openai-python", PACKAGES, cache)
    folder = take(ARCHIVE, ("tests", "pyproject.toml"), cache)
    with bundled_server(MODELS) as server:
        # Their pyproject.toml asks for pytest-xdist; one process is enough.
        options = ("-o", "addopts=", "-q", "--timeout", "60", "-W", "ignore")
        return run_suite(
            Suite(python, folder, TESTS, options, {"TEST_API_BASE_URL": f"{server.url}/v1"}, (folder,)), skips
        )


SAYS = """\
Its tests of chat, completions, models, files and responses send their requests to the bundled model. Its strict types
judge the shapes of the answers. Left out are the resources that Saccade does not have."""
JUDGE = Judge("openai-python", ARCHIVE.release, SAYS, run)
