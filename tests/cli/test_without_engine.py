"""The base installs a gateway: every command that computes no model works without torch. # F26"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import without_engine
from chats import openai_messages, random_image
from references.native import MergedPatches
from server import Server, free_port, program
from smg_servicer import Engine, servicer_class
from tokenspeed_worker import listening

IMAGE = random_image(333, 257, 1)
NEED = (
    "needs the engine: pip install 'saccade-vlm[engine]'; \"Install\" in README.md names the build of torch to install "
    "first."
)
SENTENCE = f"This {NEED}"
HELP = """
from saccade.cli.main import COMMANDS, run
print(len(COMMANDS), [name for name in COMMANDS if run([name, "--help"]) != 0])
"""
COMMANDS = """
from saccade.cli.main import run
print([run(words) for words in (["serve"], ["worker"], ["demo"], ["replay", "none"], ["ask", "What is it?"])])
"""
FROM_PYTHON = """
import saccade
from saccade.errors import NotInstalled
for start in (saccade.LLM, saccade.AsyncLLM, saccade.serve):
    try:
        start()
    except NotInstalled as error:
        print(error.message)
"""
INSPECTED = """
import sys
from saccade.cli.main import run
assert run(["models"]) == 0
sys.exit(run(["inspect", *sys.argv[1:]]))
"""


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run *program* in an environment that has no engine."""
    environment = {**os.environ, "PYTHONPATH": without_engine.write(folder)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.ci
def test_every_command_has_its_help(tmp_path: Path) -> None:
    helped = run(tmp_path, HELP)
    assert helped.stdout.splitlines()[-1].endswith(" []"), helped.stderr


@pytest.mark.ci
def test_commands_that_compute_a_model_name_what_to_install(tmp_path: Path) -> None:
    ended = run(tmp_path, COMMANDS)
    assert ended.stdout == "[2, 2, 2, 2, 2]\n"
    *said, asked = ended.stderr.splitlines()
    assert said == [f"saccade: {SENTENCE}"] * 4
    assert re.fullmatch(rf"saccade: No server answers at \S+, and the bundled model {re.escape(NEED)}", asked)


@pytest.mark.ci
def test_callers_from_python_get_the_same_sentence(tmp_path: Path) -> None:
    assert run(tmp_path, FROM_PYTHON).stdout == f"{SENTENCE}\n" * 3


@pytest.mark.ci
def test_models_are_listed_and_inputs_inspected(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    image = tmp_path / "a.png"
    random_image(80, 64, 1).save(image)
    ended = run(tmp_path, INSPECTED, str(checkpoint("qwen3_vl")), str(image))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Qwen3VLForConditionalGeneration" in ended.stdout


@pytest.mark.ci
def test_doctor_says_that_only_gateways_run(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    checked = run(tmp_path, "from saccade.cli.main import run; run(['doctor', '" + str(checkpoint("qwen3_vl")) + "'])")
    said = " ".join(checked.stdout.split())
    assert "this machine can run gateways, but no models" in said
    assert "weights are not checked without the engine" in said
    assert "Traceback" not in checked.stderr


@pytest.mark.ci
async def test_a_gateway_resizes_an_image_for_a_worker(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3_vl")
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"][0]
    engine = Engine.serving(folder, [([40], None), ([end], {"type": "stop", "matched": end})], end, vocab_size=2048)
    port = free_port()
    monkeypatch.setenv("PYTHONPATH", without_engine.write(tmp_path))
    with servicer_class(monkeypatch) as servicer_of:
        async with listening(engine.servicer(servicer_of)) as url:
            with program("gateway", "--worker-url", url, "--port", str(port), "--decode-processes", "1") as process:
                answer = await asyncio.to_thread(ask, Server(port, process))
    assert answer == "stop"
    (request,) = engine.requests
    (item,) = request.precomputed_multimodal_inputs.mm_items
    expected = MergedPatches(folder).see(IMAGE).pixel_values
    assert expected is not None
    assert torch.equal(item.feature, expected.to(torch.bfloat16))


def ask(server: Server) -> str:
    server.wait_until_ready()
    messages = openai_messages("What?", IMAGE)
    answer = server.client().chat.completions.create(model="m", messages=messages, temperature=0)
    return str(answer.choices[0].finish_reason)
