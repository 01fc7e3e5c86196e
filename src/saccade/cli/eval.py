"""`saccade eval`: score a server's answers."""

import msgspec
import uvloop

from saccade.bench.client import Server, new_session
from saccade.cli import exit_codes
from saccade.cli.output import aligned, check_writable, resumable
from saccade.config import Many
from saccade.consoles import new_console
from saccade.eval.ask import Side, examine, open_journal
from saccade.eval.page import cells, page
from saccade.eval.report import report
from saccade.eval.runner import Journal
from saccade.eval.settings import EvalSettings
from saccade.eval.tasks import Source, source_of

SETTINGS = EvalSettings()


def eval(
    url: str,
    /,
    *sources: str,
    against: str | None = None,
    model: Many = (),
    api_key: Many = (),
    settings: EvalSettings = SETTINGS,
) -> int:
    """Measure how right a server's answers are, by OCRBench, MMMU, DocVQA, MathVista and others, or a file of yours.

    `saccade eval http://127.0.0.1:8000 DocVQA_VAL.tsv --limit 200 --html docvqa.html`

    Parameters
    ----------
    url
        The server: Saccade, vLLM, SGLang, SMG or another one with /v1/chat/completions.
    sources
        A task and its files, or files whose path has the task; without any, 1000 images of text that are drawn here.
    against
        A second server, B, to compare with the first, A, answer by answer.
    model
        The model's name, by default the first that the server lists. Give it twice if the servers differ.
    api_key
        The API key; give it twice if the servers differ. Prefer SACCADE_API_KEY, which `ps` does not show.
    """
    check_writable(settings.json, settings.html)
    source = source_of(sources, settings.images, settings.limit, settings.cot)
    keys, models = ((words or ("",)) * 2 for words in (api_key, model))
    places = [(url, keys[0], models[0])] + ([(against, keys[1], models[1])] if against is not None else [])
    journal = open_journal(settings, source)
    with resumable(journal):
        sides = uvloop.run(_examine(places, source, settings, journal))
    result = report(source.name, sides, settings)
    for label, side in zip("AB", sides, strict=False):
        print(f"{label}: {side.server.root}, {side.server.model} {side.server.version}")
    print(f"\n{source.title}, score in % (95 % interval)", *aligned(cells(result), len(sides) + 1), "", sep="\n")
    print(*result.notes, f"The answers are in {journal.path}", sep="\n")
    if settings.json is not None:
        settings.json.write_bytes(msgspec.json.encode(result, enc_hook=str))
    if settings.html is not None:
        settings.html.write_text(page(result, source), encoding="utf-8")
    return exit_codes.ERROR if any(one.error for side in sides for one in side.answers) else 0


async def _examine(
    places: list[tuple[str, str, str]], source: Source, settings: EvalSettings, journal: Journal
) -> list[Side]:
    """Ask one server, then the other."""
    async with new_session(settings.timeout) as session:
        servers = [await Server(url, session, key, model=model).named() for url, key, model in places]
        with new_console(stderr=True).status("") as status:
            return [
                await examine(server, source, settings, journal, lambda num: status.update(f"{num} answers"))
                for server in servers
            ]
