"""`saccade pull`: fetch a model from the hub."""

import gc

from saccade.cli.screen import size
from saccade.models import families, family_of, load_spec
from saccade.models.files import engine_config, parse_json, read_model_files
from saccade.protocol.model_files import CONFIG
from saccade.supervisor.checkpoint import fetch


def pull(model: str, /) -> None:
    """Fetch a model from the hub to its cache, so that `saccade serve` finds it there.

    Only the files that Saccade reads are fetched: no code and no pickled weights. HF_TOKEN, HF_ENDPOINT and HF_HOME are
    honoured.

    Parameters
    ----------
    model
        A hub id such as Qwen/Qwen3-VL-2B-Instruct, or with a revision Qwen/Qwen3-VL-2B-Instruct@main.
    """
    # An unsupported model is refused before its weights are fetched.
    files = read_model_files(fetch(model, weights=False))
    family = family_of(parse_json(files, CONFIG))
    if families()[family].library is not None:
        load_spec(family, engine_config(files, families()[family]))
    folder = fetch(model)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    gc.collect()  # ends the bars of the hub's client, which else are drawn over the line below
    print(f"{model} is in {folder} ({size(num_bytes)}). Serve it: `saccade serve {model}`.")
