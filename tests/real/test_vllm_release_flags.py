"""Every flag of `vllm serve` in vLLM's release is known by name. # F15"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import FOLDER
from judges.archives import take
from judges.suites.vllm_archive import ARCHIVE

from saccade.cli.vllm_flags import FLAGS

pytestmark = pytest.mark.real
ENGINE, FRONT = "vllm/engine/arg_utils.py", "vllm/entrypoints/common/cli_args.py"
CLASSES_OF_FLAGS = {"BaseFrontendArgs", "FrontendArgs"}
"""The classes of FRONT whose fields become flags."""


def flags_of(source: str) -> Iterator[str]:
    """The names that a parser of *source* gets, and those of the fields of its classes of flags."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=words):
                names = [word.value for word in words if isinstance(word, ast.Constant)]
                yield from (name for name in names if isinstance(name, str) and name.startswith("-"))
            case ast.ClassDef(name=name, body=body) if name in CLASSES_OF_FLAGS:
                fields = [line.target for line in body if isinstance(line, ast.AnnAssign)]
                yield from (f"--{field.id.replace('_', '-')}" for field in fields if isinstance(field, ast.Name))


def test_every_flag_of_the_release_is_known() -> None:
    folder: Path = take(ARCHIVE, (ENGINE, FRONT), FOLDER)
    theirs = {name for file in (ENGINE, FRONT) for name in flags_of((folder / file).read_text())}
    assert len(theirs) > 300
    assert theirs - {name for flag in FLAGS for name in flag.names} == set()
