"""`saccade fleet`: its actions, and the flags of former releases."""

from pathlib import Path

import pytest
from server import free_port
from tables import table

from saccade.cli.main import run

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # Ray's own
EXAMPLE = str(Path(__file__).parents[2] / "deploy" / "ray" / "fleet.yaml")


@table(
    ("words", "said"),
    [
        (["apply"], "`saccade fleet apply` takes the FILE to apply."),
        (["status", "fleet.yaml"], "`saccade fleet status` takes no FILE."),
        (["watch"], "`saccade fleet watch` needs --workers-file"),
        (["apply", "fleet.yaml", "--workers-file", "w"], "no other action takes it"),
        (["apply", "missing.yaml"], "missing.yaml cannot be read"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [["apply", EXAMPLE], ["status"], ["delete"], ["watch", "--workers-file", "workers"]])
def test_a_missing_cluster_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", *words, "--ray", f"127.0.0.1:{free_port()}"]) == 1
    said = capsys.readouterr().err
    assert "There is no Ray cluster at" in said
    assert "Traceback" not in said


def test_the_former_command_says_what_the_actions_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "acme/model", "--ray", "127.0.0.1:6379"]) == 2
    said = capsys.readouterr().err
    assert all(action in said for action in ("apply", "status", "delete", "watch"))
