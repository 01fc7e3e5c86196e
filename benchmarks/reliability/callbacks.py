"""The longest callback of a gateway's event loop for each field of each API, filled as far as a body may be.

    python -m benchmarks.reliability.callbacks [--mib 0.12 1.9 60] [--fields NAME ...] [--out FILE]

One request at a time goes to a gateway before a worker of the bundled model. Each field gets one long text, and arrays
of texts, objects, numbers and arrays. Whether the request is refused does not matter: what counts is the processor time
of the loop's thread in one callback, since nobody else is served meanwhile.
"""

import argparse
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from waiting import wait_until

from benchmarks.measured import MIB, ROOT, end_with_what_was_started, free_ports, process
from benchmarks.reliability.processes import provenance

LONGEST_SECONDS = 0.02
TIMEOUT_SECONDS = 120.0
TURN = '[{"role":"user","content":"a"}]'
FIRST = '{"role":"user","content":"a"}'
CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":%s}}'
CALLED = f'{{"role":"assistant","content":"b","tool_calls":[{CALL}]}}'
SCHEMA = '{"type":"json_schema","json_schema":{"name":"a","schema":%s}}'
TOOL = '{"type":"function","function":{"name":"f","description":%s,"parameters":{"type":"object"}}}'

FILLS: Mapping[str, str] = {
    "a text": "",
    "texts": '"ab"',
    "objects": '{"a":"b"}',
    "numbers": "1",
    "arrays": "[[]]",
    "turns": FIRST,
    "parts": '{"type":"text","text":"a"}',
    "keys": ":",
}
"""What an array is filled with; a text and an object of many keys are values by themselves."""


class Field(NamedTuple):
    """A place in a body: the path of the API, and a body with `@` in place of the value."""

    path: str
    form: str


def fields() -> dict[str, Field]:
    """Return the fields of each API by name."""
    chat = "/v1/chat/completions"
    names = (
        "messages", "tools", "tool_choice", "response_format", "structured_outputs", "stop", "stop_token_ids",
        "logit_bias", "allowed_token_ids", "bad_words", "metadata", "user", "model", "chat_template_kwargs",
        "mm_processor_kwargs", "media_io_kwargs", "stream_options", "prompt_cache_key", "modalities", "unknown",
    )  # fmt: skip
    found = {f"chat: {name}": Field(chat, f'{{"messages":{TURN},"max_tokens":2,"{name}":@}}') for name in names}
    found["chat: content"] = Field(chat, '{"messages":[{"role":"user","content":@}],"max_tokens":2}')
    found["chat: system content"] = Field(
        chat, f'{{"messages":[{{"role":"system","content":@}},{FIRST}],"max_tokens":2}}'
    )
    found["chat: reasoning"] = Field(
        chat,
        f'{{"messages":[{FIRST},{{"role":"assistant","content":"a","reasoning_content":@}},{FIRST}],"max_tokens":2}}',
    )
    found["chat: arguments"] = Field(chat, f'{{"messages":[{FIRST},{CALLED % "@"},{FIRST}],"max_tokens":2}}')
    found["chat: image url"] = Field(
        chat, '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":@}}]}],"max_tokens":2}'
    )
    found["chat: schema"] = Field(chat, f'{{"messages":{TURN},"max_tokens":2,"response_format":{SCHEMA % "@"}}}')
    found["chat: enumeration"] = Field(
        chat, f'{{"messages":{TURN},"max_tokens":2,"response_format":{SCHEMA % chr(123)}"enum":@}}}}}}}}'
    )
    found["chat: grammar"] = Field(chat, f'{{"messages":{TURN},"max_tokens":2,"structured_outputs":{{"grammar":@}}}}')
    found["chat: regex"] = Field(chat, f'{{"messages":{TURN},"max_tokens":2,"structured_outputs":{{"regex":@}}}}')
    found["chat: choice"] = Field(chat, f'{{"messages":{TURN},"max_tokens":2,"structured_outputs":{{"choice":@}}}}')
    found["chat: description of a tool"] = Field(chat, f'{{"messages":{TURN},"max_tokens":2,"tools":[{TOOL % "@"}]}}')
    for name in ("prompt", "suffix", "stop", "logit_bias", "user", "unknown"):
        rest = "" if name == "prompt" else '"prompt":"a",'
        found[f"completions: {name}"] = Field("/v1/completions", f'{{{rest}"max_tokens":2,"{name}":@}}')
    for name in ("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences", "metadata", "unknown"):
        found[f"messages: {name}"] = Field("/v1/messages", f'{{"max_tokens":2,"messages":{TURN},"{name}":@}}')
    found["messages: content"] = Field("/v1/messages", '{"max_tokens":2,"messages":[{"role":"user","content":@}]}')
    found["messages: input"] = Field(
        "/v1/messages",
        f'{{"max_tokens":2,"messages":[{FIRST},{{"role":"assistant","content":[{{"type":"tool_use","id":"a","name":"f",'
        f'"input":{{"a":@}}}}]}},{FIRST}]}}',
    )
    found["count: messages"] = Field("/v1/messages/count_tokens", '{"messages":@}')
    for name in (
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "metadata",
        "include",
        "unknown",
    ):
        rest = "" if name == "input" else '"input":"a",'
        found[f"responses: {name}"] = Field("/v1/responses", f'{{{rest}"max_output_tokens":2,"{name}":@}}')
    found["responses: content"] = Field(
        "/v1/responses", '{"max_output_tokens":2,"input":[{"role":"user","content":@}]}'
    )
    found["tokenize: prompt"] = Field("/tokenize", '{"prompt":@}')
    found["tokenize: messages"] = Field("/tokenize", '{"messages":@}')
    found["detokenize: tokens"] = Field("/detokenize", '{"tokens":@}')
    return found


def values(num_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the JSON text of each value of about *num_bytes*."""
    for name, item in FILLS.items():
        if name == "a text":
            yield name, json.dumps("lorem ipsum " * (num_bytes // 12))
            yield "a text of escapes", '"' + "\\u00e9\\n" * (num_bytes // 8) + '"'
            yield "an image", json.dumps("data:image/png;base64," + "AAAA" * (num_bytes // 4))
            yield "a text as JSON", json.dumps("[" + "0," * (num_bytes // 2) + "0]")
        elif name == "keys":
            yield name, "{" + ",".join(f'"{number}":1' for number in range(num_bytes // 12)) + "}"
        else:
            yield name, "[" + ",".join([item] * (num_bytes // (len(item) + 1))) + "]"


def whole_bodies() -> Iterator[tuple[str, Field]]:
    """Yield requests that are answered, as large as their bounds allow."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    stops = json.dumps([letter * 1000 for letter in "abcdefghijklmnop"])
    bias = json.dumps({str(number): 0.5 for number in range(300)})
    ids = json.dumps(list(range(1000)))
    prompts = json.dumps(["a b"] * 128)
    for name, path, rest in (
        ("n", chat, '"n":128,"max_tokens":64'),
        ("n and stops", chat, f'"n":128,"max_tokens":64,"stop":{stops}'),
        ("n and log probabilities", chat, '"n":128,"max_tokens":32,"logprobs":true,"top_logprobs":20'),
        (
            "n, stream and log probabilities",
            chat,
            '"n":128,"max_tokens":32,"logprobs":true,"top_logprobs":20,"stream":true',
        ),
        ("biases", chat, f'"max_tokens":64,"logit_bias":{bias}'),
        ("allowed ids", chat, f'"max_tokens":64,"allowed_token_ids":{ids}'),
        ("a long answer", chat, '"max_tokens":2000,"ignore_eos":true'),
    ):
        yield f"chat: {name}", Field(path, f'{{"messages":{TURN},{rest}}}')
    for name, rest in (
        ("prompts", '"max_tokens":4'),
        ("prompts and stops", f'"max_tokens":8,"stop":{stops}'),
        ("prompts with log probabilities", '"max_tokens":4,"logprobs":5,"echo":true'),
    ):
        yield f"completions: {name}", Field(completions, f'{{"prompt":{prompts},{rest}}}')


class Row(NamedTuple):
    """The longest callback of a request."""

    seconds: float
    field: str
    value: str
    status: str
    what: str


def measure(url: str, lines: Path, name: str, field: Field, value: tuple[str, str], model: str) -> Row:
    """Send one request, and return the longest callback meanwhile."""
    lines.write_text("")
    body = field.form.replace("@", value[1])
    if '"model":' not in body[:100]:
        body = f'{{"model":{json.dumps(model)},{body[1:]}'
    asked = urllib.request.Request(f"{url}{field.path}", body.encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_SECONDS) as response:
            response.read()
            status = str(response.status)
    except urllib.error.HTTPError as error:
        status = f"{error.code} {_code(error.read())}"
    except OSError as error:
        status = type(error).__name__
    noted = [json.loads(line) for line in lines.read_text().splitlines()]
    longest: dict[str, Any] = max(noted, key=lambda one: float(one["seconds"]), default={"seconds": 0.0, "what": ""})
    return Row(longest["seconds"], name, value[0], status, longest["what"])


def _code(body: bytes) -> str:
    """Return the code of an error, or the beginning of another answer."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:40].decode(errors="replace")


def report(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of Markdown: the requests with the longest callbacks, the longest first."""
    longest = sorted(rows, reverse=True)
    over = [row for row in longest if row.seconds > LONGEST_SECONDS]
    yield from ("# Callbacks of the event loop", "", *provenance(), "- one request at a time", "")
    yield f"{len(over)} of {len(rows)} requests have a callback that takes more than {1000 * LONGEST_SECONDS:.0f} ms."
    yield from ("", "| field | filled with | ms | answer | callback |", "|---|---|---|---|---|")
    for row in longest[: max(len(over), 30)]:
        yield f"| {row.field} | {row.value} | {1000 * row.seconds:.0f} | {row.status} | {row.what} |"


def wait_for_model(url: str) -> str:
    """Return the name of the model that the gateway serves, as soon as it serves one."""

    def served() -> str:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
                data = json.loads(response.read())["data"]
                return str(data[0]["id"]) if data else ""
        except OSError:
            return ""

    return wait_until(served)


def main() -> int:
    """Run, write the report, return 0: it is read by people."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[0.12, 1.9, 60.0])
    parser.add_argument("--fields", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/callbacks.md")
    arguments = parser.parse_args()
    end_with_what_was_started()
    worker_port, port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        lines = Path(folder) / "callbacks"
        lines.touch()
        worker = [sys.executable, "-m", "saccade.cli.main", "worker", "--port", str(worker_port)]
        gateway = [sys.executable, "-m", "benchmarks.reliability.watched_gateway", str(lines), "gateway"]
        gateway += ["--worker-url", f"grpc://127.0.0.1:{worker_port}", "--port", str(port)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with process(worker, log.fileno(), environment), process(gateway, log.fileno(), environment):
            model = wait_for_model(url)
            rows = [measure(url, lines, name, field, ("", ""), model) for name, field in whole_bodies()]
            for name, field in fields().items():
                if arguments.fields and name not in arguments.fields:
                    continue
                for mib in arguments.mib:
                    for value in values(int(mib * MIB)):
                        rows.append(measure(url, lines, f"{name}, {mib:g} MiB", field, value, model))
                        print(rows[-1], flush=True)
    text = "\n".join(report(rows)) + "\n"
    arguments.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
