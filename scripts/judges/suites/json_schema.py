"""The JSON Schema Test Suite, of which jsonschema's source archive has a copy: grammars write what is valid."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from json_schema_suite import Case, cases, tried, wrong_instances

from judges.archives import Archive, take
from judges.judge import Judge
from judges.outcomes import FAILED, PASSED, SKIPPED, Outcome

ARCHIVE = Archive(
    "jsonschema",
    "jsonschema-4.26.0.tar.gz",
    "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326",
)
DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


def run(cache: Path, skips: frozenset[str]) -> Iterator[Outcome]:
    """Judge every schema; one that strict output refuses was not run."""
    folder = take(ARCHIVE, [f"json/tests/{draft}" for draft in DRAFTS], cache) / "json" / "tests"
    for draft in DRAFTS:
        yield from judge_cases(draft, cases(folder / draft))


def judge_cases(draft: str, found: Iterable[Case]) -> Iterator[Outcome]:
    """Judge the schemas of a draft. Where several of a file have one name, the later ones get a number."""
    seen = Counter[str]()
    for case in found:
        seen[case.name] += 1
        number = f" ({seen[case.name]})" if seen[case.name] > 1 else ""
        trial = tried(case)
        if trial.grammar is None:
            became, why = SKIPPED, trial.message
        else:
            why = "\n".join(wrong_instances(trial.grammar, case, Counter()))
            became = FAILED if why else PASSED
        file, _, name = case.name.partition(": ")
        yield Outcome(f"{draft}/{file}::{name}{number}", became, why)


SAYS = """\
Drafts 4 to 2020-12 of the release's copy of the JSON Schema Test Suite. Every schema is compiled as a `strict` request
would. Its grammar must write every valid instance and no invalid one ([JSON Schema](json-schema.md)). Left out is what
the suite calls optional, draft 3, and the next draft."""
JUDGE = Judge("json-schema", ARCHIVE.release, SAYS, run)
