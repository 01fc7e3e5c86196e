"""docs/judges.md, made of the judges and their lists."""

from collections.abc import Iterable

from judges.judge import Judge
from judges.outcomes import Known, Reason, read_known

INTRODUCTION = """\
# Judges

What tests that others wrote say about Saccade. `make judges` runs them and writes this page; it is meant for every
night. It takes the source archives of releases, checks their digests and unpacks the tests below `.cache/judges`. No
archive is built, and nothing of it is a part of Saccade. Servers are on loopback.

- `make judges ARGS="NAME ..."` runs some judges. Each ends within ten minutes.
- A test that fails is listed by its name, with a reason, in `scripts/judges/known`. So is a test that does not apply:
  it is not run. A failure that is not listed fails the run.
- A listed test that passes fails the run too, and so does a name that is no test. `make judges ARGS=--shrink` takes
  such names out of the lists. No command adds one.

"""


def page(judges: Iterable[Judge]) -> str:
    """The page: a table of all judges, then what is known of each."""
    with_lists = [(judge, read_known(judge.known)) for judge in judges]
    rows = ["| judge | release | passed | failed | not applicable |", "|---|---|---|---|---|"]
    for judge, known in with_lists:
        counts = (known.passed, len(known.failures), len(known.skips))
        rows.append(f"| [{judge.name}](#{judge.name}) | {judge.release} | {' | '.join(map(str, counts))} |")
    return INTRODUCTION + "\n".join([*rows, ""]) + "".join(section(judge, known) for judge, known in with_lists)


def section(judge: Judge, known: Known) -> str:
    """What a judge runs, what it leaves out, and its reasons with the number of names that each stands for."""
    rows = [_row(reason, "failed") for reason in known.failed]
    rows += [_row(reason, "not applicable") for reason in known.not_applicable]
    return "\n".join([f"\n## {judge.name}\n\n{judge.says}\n\n| why | tests |", "|---|---|", *rows]) + "\n"


def _row(reason: Reason, became: str) -> str:
    text = reason.text.replace("|", "\\|")
    return f"| {text} | {len(reason.names)} {became} |"
