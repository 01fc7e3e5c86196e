"""A model with a damaged token, through the four APIs: one error for each request that has it, and right answers. F25"""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
from safetensors.torch import load_file, save_file
from server import Server, serving
from tables import table
from tokenizers import Tokenizer

pytestmark = pytest.mark.ci

DIGIT = "7"
PROMPT = list(range(40, 60))
CHAT = [{"role": "user", "content": f"What is {DIGIT}?"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": CHAT},
    "completions": {"prompt": f"What is {DIGIT}?"},
    "messages": {"messages": CHAT, "max_tokens": 8},
    "responses": {"input": f"What is {DIGIT}?"},
}
WORDS = "not numbers (NaN or infinity)"


@pytest.fixture(scope="module")
def right(tiny_qwen3_vl: Path) -> list[int]:
    """The greedy answer to PROMPT, of 8 tokens."""
    asked = engines.request(tiny_qwen3_vl, [1], "a", max_tokens=8)
    asked = msgspec.structs.replace(asked, token_ids=PROMPT)
    return engines.drain(engines.engine(tiny_qwen3_vl), asked).answers["a"].token_ids


@pytest.fixture(scope="module")
def served(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int]]:
    """The server, and the id of the token that is damaged."""
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path_factory.mktemp("damaged") / "model")
    [token_id] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(DIGIT, add_special_tokens=False).ids
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [one for one in tensors if one.endswith("embed_tokens.weight")]:
            tensors[name][token_id] = float("nan")
        save_file(tensors, file, {"format": "pt"})
    log = folder.parent / "log"
    with serving(str(folder), "--max-model-len", "512", log=log) as server:
        yield server, token_id


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the body of the answer."""
    content = json.dumps({"model": server.name, **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/{path}", content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.ci
@table("path", REQUESTS)
@table("stream", [False, True])
@table("n", [1, 2])
def test_one_error_in_every_api(path: str, stream: bool, n: int, served: tuple[Server, int]) -> None:
    several = {"n": n} if n > 1 and path.endswith("completions") else {}
    status, text = post(served[0], path, {**REQUESTS[path], **several, "temperature": 1, "stream": stream})
    assert status == 500 or stream
    assert text.count(WORDS) == 1
    assert "non_finite_output" in text or path == "messages"


def test_a_stream_that_has_begun_ends_with_an_error_event(served: tuple[Server, int]) -> None:
    server, token_id = served
    # Its own answer has the token: a bias makes it certain.
    body = {"prompt": "What is it?", "max_tokens": 8, "stream": True, "logit_bias": {str(token_id): 100}}
    status, text = post(server, "completions", body)
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[0])["choices"]
    assert json.loads([one for one in events if one != "[DONE]"][-1])["error"]["code"] == "non_finite_output"


def test_grammar_is_not_to_blame(served: tuple[Server, int]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, text = post(served[0], "chat/completions", {"messages": CHAT, "response_format": wanted})
    assert status == 500
    assert json.loads(text)["error"]["code"] == "non_finite_output"


def test_later_answers_are_right_and_the_operator_hears_of_it(served: tuple[Server, int], right: list[int]) -> None:
    server, _ = served
    before = server.settled("saccade_non_finite_requests_total")
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    assert json.loads(post(server, "completions", body)[1])["choices"][0]["token_ids"] == right
    assert post(server, "chat/completions", {"messages": CHAT})[0] == 500
    assert json.loads(post(server, "completions", body)[1])["choices"][0]["token_ids"] == right
    assert server.settled("saccade_non_finite_requests_total") == before + 1
    assert server.log is not None
    assert "computed values that are not finite" in server.log.read_text()
