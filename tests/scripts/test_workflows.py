"""What workflows, hooks and issue forms name exists, and their forms are those that GitHub reads."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tables import table

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").iterdir())}
FORMS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "ISSUE_TEMPLATE").iterdir())}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JOBS = [(f"{name}: {job}", content) for name, flow in WORKFLOWS.items() for job, content in flow["jobs"].items()]
STEPS = [(name, step) for name, job in JOBS for step in job.get("steps", [])]
COMMANDS = [shlex.split(step["run"]) for _, step in STEPS if "run" in step]
MATRIX = WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
PINNED = re.compile(r"@(?:release/)?v\d+$|@[0-9a-f]{40}$")
PATH = re.compile(r"(?<![\w./@-])(?:\./)?(?:\.ci|\.github|docs|release|scripts|src|tests)/[\w./-]*\w")


def fits(schema: str, content: Any) -> None:
    """Raise unless *content* fits the *schema*, one of those that check-jsonschema ships."""
    text = (files("check_jsonschema") / f"builtin_schemas/vendor/{schema}.json").read_text()
    definition = json.loads(text)
    jsonschema.validators.validator_for(definition)(definition).validate(content)


@table("name", WORKFLOWS)
def test_a_workflow_has_the_form(name: str) -> None:
    flow = {("on" if key is True else key): value for key, value in WORKFLOWS[name].items()}  # YAML's `on` is true
    fits("github-workflows", flow)
    assert flow["permissions"] == {"contents": "read"}
    assert "group" in flow["concurrency"]


@table("name", FORMS)
def test_an_issue_form_has_the_form(name: str) -> None:
    fits("github-issue-config" if name == "config.yml" else "github-issue-forms", FORMS[name])


@table("name, job", JOBS)
def test_a_job_has_a_limit_and_no_right_to_write(name: str, job: dict[str, Any]) -> None:
    assert "timeout-minutes" in job or "uses" in job  # a workflow that is called has its own limits
    assert job.get("permissions", {}) == ({"id-token": "write"} if name == "release.yml: publish" else {})


@table("name, step", STEPS)
def test_an_action_is_pinned(name: str, step: dict[str, Any]) -> None:
    assert "uses" not in step or PINNED.search(step["uses"]), step


def sources() -> Iterator[Path]:
    """The files here that name paths."""
    yield from (path for path in GITHUB.rglob("*") if path.is_file())
    yield from (ROOT / name for name in (".pre-commit-config.yaml", "release/owner.toml", "CODE_OF_CONDUCT.md"))


@table("source", sources())
def test_paths_lead_somewhere(source: Path) -> None:
    assert [path for path in PATH.findall(source.read_text()) if not (ROOT / path).exists()] == []


def test_programs_and_targets_of_make_exist() -> None:
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    named = [command[1] for command in COMMANDS if command[0] == "make"]
    assert set(named) - set(targets) == set()
    assert {"conformance", "judges", "peers"} <= set(named)
    assert [".ci/run"] in COMMANDS
    installs = next(command[4:] for command in COMMANDS if command[:4] == ["python", "-m", "pip", "install"])
    programs = {command[0] for command in COMMANDS} - {"make", "python", "sudo", ".ci/run"}
    assert programs <= set(installs)


def test_conformance_of_the_night_knows_its_option(request: pytest.FixtureRequest) -> None:
    (arguments,) = (command[2:] for command in COMMANDS if command[:2] == ["make", "conformance"])
    assert arguments == ["ARGS=--every"]
    assert request.config.getoption("--every") is False


def test_versions_of_python_are_those_of_the_classifiers() -> None:
    prefix = "Programming Language :: Python :: 3."
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert classifiers == MATRIX
    assert PROJECT["requires-python"] == f">={MATRIX[0]}"
    others = {step["with"]["python-version"] for _, step in STEPS if "python-version" in step.get("with", {})}
    assert others == {"${{ matrix.python }}", MATRIX[0]}


def test_hooks_run_what_scripts_check_runs() -> None:
    lines = (ROOT / "scripts" / "check").read_text().partition("\nbin=")[2].splitlines()[1:]
    commands = [re.sub(r'"\$bin/([^"]+)"', r".venv/bin/\1", line) for line in lines]
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"].removeprefix("env ") for hook in repository["hooks"]] == commands
    assert {(hook["language"], hook["pass_filenames"]) for hook in repository["hooks"]} == {("system", False)}


def test_contributing_names_every_workflow() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in WORKFLOWS if f"| `{name}` |" not in page] == []
