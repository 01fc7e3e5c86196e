"""Run clients that others wrote against `saccade serve`, and write docs/clients.md: python scripts/clients [NAME ...].

With names of programs, only these run, and their rows are printed instead.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path += map(str, [Path(__file__).parents[2] / "tests", *Path(__file__).parents[2].glob("tests/support/*")])

from checkpoints import write_qwen3_vl
from coding_agents import agent_gateways
from environments import programs
from PIL import Image
from running import run
from server import Server, serving
from table import page

from saccade.cli.bundled import bundled

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("SACCADE_CLIENTS", ROOT / ".cache" / "clients"))
PAGE = ROOT / "docs" / "clients.md"
IMAGE = "5RIU-green.png"
KEY = "a-key-for-this-run"


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Start both servers and the gateways of agents; yield what programs find in their environment."""
    model = write_qwen3_vl(folder / "tiny-qwen3-vl")
    flags = ("--no-summary", "--api-key", KEY)
    with (
        serving(*flags, key=KEY) as reader,
        serving(str(model), "--max-model-len", "8192", *flags, key=KEY) as caller,
        agent_gateways(folder) as agents,
    ):
        image = bundled(f"images/texts/{IMAGE}")
        yield {
            **agents,
            **_target("READER", reader),
            **_target("CALLER", caller),
            "API_KEY": KEY,
            "READER_FOLDER": str(bundled("model")),
            "CALLER_FOLDER": str(model),
            "IMAGE": str(image),
            "IMAGE_SAYS": IMAGE.partition("-")[0],
            "VIDEO": str(_video(image, folder)),
            "WORK_FOLDER": str(folder),
            "SACCADE_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(__file__).parent),
        }


def _video(image: Path, folder: Path) -> Path:
    """Write a video that shows *image* for a second."""
    path = folder / "video.gif"
    with Image.open(image) as frame:
        frame.save(path, save_all=True, append_images=[frame], duration=500)
    return path


def _target(name: str, server: Server) -> dict[str, str]:
    return {f"{name}_ROOT": server.url, f"{name}_MODEL": server.model}


def main(names: list[str]) -> int:
    """Run the programs; the exit status says whether all rows work."""
    chosen = [program for program in programs() if not names or program.name in names]
    results = []
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as settings:
        for program in chosen:
            for result in run(program, CACHE, settings):
                print(json.dumps(asdict(result)), flush=True)
                results.append(result)
    if not names:
        PAGE.write_text(page(results))
    return 0 if results and all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
