"""`saccade bench`: measure one or two running servers."""

import msgspec
import uvloop

from saccade.bench.client import Server, new_session
from saccade.bench.page import page
from saccade.bench.report import Result, measure
from saccade.bench.settings import BenchSettings
from saccade.cli import exit_codes
from saccade.cli.output import aligned, check_writable
from saccade.config import Many
from saccade.consoles import new_console

SETTINGS = BenchSettings()


def bench(
    url: str,
    other: str | None = None,
    /,
    *,
    model: Many = (),
    api_key: Many = (),
    metrics_key: Many = (),
    settings: BenchSettings = SETTINGS,
) -> int:
    """Measure a server of the OpenAI API under load, or two servers in turn.

    `saccade bench http://127.0.0.1:8000 --concurrency 1,8`

    Parameters
    ----------
    url
        The server: Saccade, vLLM, SGLang, SMG or another one with /v1/chat/completions.
    other
        A second server, B, to compare with the first, A.
    model
        The model's name, by default the first that the server lists. Give it twice if the servers differ.
    api_key
        The API key; give it twice if the servers differ. Prefer SACCADE_API_KEY, which `ps` does not show.
    metrics_key
        The key of /metrics, by default the API key; give it twice if the servers differ.
    """
    check_writable(settings.json, settings.html)
    keys, metrics_keys, models = ((words or ("",)) * 2 for words in (api_key, metrics_key, model))
    sides = [(url, keys[0], metrics_keys[0], models[0])]
    if other is not None:
        sides.append((other, keys[1], metrics_keys[1], models[1]))
    result = uvloop.run(_measure(sides, settings))
    for label, server in zip("AB", result.servers, strict=False):
        print(f"{label}: {server['root']}, {server['model']} {server['version']}")
        if not server["takes_ignore_eos"]:
            print(f"{label} does not take ignore_eos: its model decides how long answers are.")
    for table in result.tables:
        print(f"\n{table.title}", *aligned(table.lines(), len(table.columns) + 1), *table.notes(), sep="\n")
    print(f"\nThe same requests again: --seed {result.seed}")
    if settings.json is not None:
        settings.json.write_bytes(msgspec.json.encode(result, enc_hook=str))
    if settings.html is not None:
        settings.html.write_text(page(result), encoding="utf-8")
    has_answers = all("ttft_p50" in column.figures for table in result.tables for column in table.columns)
    return 0 if has_answers else exit_codes.ERROR


async def _measure(sides: list[tuple[str, str, str, str]], settings: BenchSettings) -> Result:
    progress = new_console(stderr=True, style="dim", soft_wrap=True)
    async with new_session(settings.timeout) as session:
        servers = [Server(url, session, key, metrics_key, model) for url, key, metrics_key, model in sides]
        return await measure(servers, settings, progress.print)
