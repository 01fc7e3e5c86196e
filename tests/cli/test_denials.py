"""What Saccade says it lacks, it lacks: whoever builds one of these features finds the sentences that deny it here."""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tables import table

from saccade.cli.main import COMMANDS, make_app
from saccade.cli.vllm_flags import FLAGS, Support
from saccade.engine.config import EngineSettings
from saccade.errors import UnsupportedParameter
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.openapi import describe
from saccade.gateway.known_parameters import LATER
from saccade.gateway.prompt.messages import PARTS, REFUSED_PARTS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "saccade"
API_PAGES = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
DENIAL = re.compile(r"\b(no|not|never|nothing|cannot|only|none)\b", re.IGNORECASE)
SIGNS: Final[Mapping[str, str]] = {
    "--enable-lora --lora-modules --max-loras --lora-dtype --lora-target-modules --enable-tower-connector-lora": "lora|adapter",
    "--disable-cascade-attn": "cascade",
    "--enforce-eager --max-seq-len-to-capture --cudagraph-capture-sizes --compilation-config -O0": (
        "compilation|compiled|optimization.level"
    ),
    "--task --enable-flash-late-interaction --pooler-config": "^path .*(embed|rerank|score|classify|pooling)",
    "--enable-log-requests --max-log-len --enable-log-outputs --log-error-stack": "log.(outputs|prompts|answers|len)",
    "--swap-space --cpu-offload-gb --kv-offloading-size --kv-offloading-backend": "(?<!routing-)offload|swap",
    "--enable-sleep-mode --sleep-mode-backend --sleep-preserve-parameter-names": "sleep|wake.up|tokenizer.info|^path /inference",
    "--load-format --pt-load-map-location --model-loader-extra-config": "gguf|pickle|bitsandbytes",
    "--enable-mm-embeds": "^part image_embeds|^flag .*mm.embeds",
    "--pipeline-parallel-size": "pipeline.?parallel",
    "--trust-remote-code --code-revision": "auto.map|dynamic.module",
    "--middleware --worker-cls --worker-extension-cls --model-class-overrides --logits-processors": (
        "plugin|^flag .*(middleware|worker.cls)"
    ),
    "--tool-parser-plugin": "tool.server|mcp",
    "--video-pruning-rate": "prun",
    "--moe-backend": "^flag .*(moe|linear|all2all).*backend",
    "--enable-flashinfer-autotune --replayssm-buffer-len --ir-op-priority": "autotune|monokernel|replayssm",
    "--enable-dbo --ubatch-size --nnodes": "^flag .*(dbo|ubatch|nnodes|context.parallel)",
    "--swa-bounded-replay": "bounded.replay|hybrid.kv",
    "--ignore-patterns": "ignore.patterns",
    "--fingerprint-mode": "system.fingerprint",
    "--mm-encoder-only": "encode.worker|encoder.only",
    "--enable-prompt-embeds": "prompt.embeds",
    "--enable-return-routed-experts --aux-output-config --enable-per-request-metrics": (
        "routed.experts|sampling.mask|decode.metrics"
    ),
    "--diffusion-config --cohere-is-reasoning-model --cohere-format": "diffusion|engram|cohere",
    "--watermark-config": "watermark",
}
"""The flags whose notes deny a feature: what a name in the interface, or of a module, would contain if it were there."""


def fields(schema: object) -> Iterator[str]:
    """Yield the names of all properties in a JSON *schema*."""
    match schema:
        case dict():
            properties = schema.get("properties")
            yield from properties if isinstance(properties, dict) else ()
            for part in schema.values():
                yield from fields(part)
        case list():
            for part in schema:
                yield from fields(part)


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """The flags of each command."""
    app = make_app(None)
    return {
        command: {name for argument in app[command].assemble_argument_collection() for name in argument.names}
        for command in COMMANDS
    }


@pytest.fixture(scope="module")
def interface(flags: dict[str, set[str]]) -> set[str]:
    """Every flag, path, field and part of a message, and every module's path, with what it is before it."""
    api = describe(["m"])
    return {
        *(f"flag {command} {name}" for command, names in flags.items() for name in names),
        *(f"path {path}" for path in api["paths"]),
        *(f"field {name}" for name in fields(api)),
        *(f"part {name}" for name in PARTS),
        *(f"module {path.relative_to(SOURCE)}" for path in SOURCE.rglob("*.py")),
    }


def test_denied_features_are_absent(interface: set[str]) -> None:
    for flags, sign in SIGNS.items():
        found = sorted(name for name in interface if re.search(sign, name))
        assert found == [], f"it is there: mend the notes of {flags} in vllm_flags.py that deny it"


def test_signs_of_a_denied_feature_are_detected(interface: set[str]) -> None:
    """Features that are there, of which notes once said that they were not."""
    for sign in ("structured.outputs", "gateway.processes", "^path /v1/files", "^field video$", "^module .*grammars"):
        assert any(re.search(sign, name) for name in interface), sign


def test_a_note_that_denies_has_a_sign() -> None:
    denying = {flag.names[0] for flag in FLAGS if DENIAL.search(flag.sentence)}
    served = {flag.names[0] for flag in FLAGS if flag.support is Support.SERVED}
    named = {name for flags in SIGNS for name in flags.split()}
    assert denying - named - served == set()
    assert named <= {flag.names[0] for flag in FLAGS}


def test_notes_name_flags_and_fields_that_exist(flags: dict[str, set[str]]) -> None:
    ours = set().union(*flags.values()) | {"--config", "--help-all"}
    names = {f"`{name}`" for name in fields(describe(["m"]))}
    for flag in FLAGS:
        for name in re.findall(r"`(?:saccade \w+ )?(--[a-z][a-z-]*)", flag.sentence):
            assert name in ours, flag
        for path in re.findall(r"\b[Ss]end `([\w.]+)`", flag.sentence):
            assert {f"`{part}`" for part in path.split(".")} <= names, flag


@table("name", LATER)
def test_fields_that_refusals_say_to_leave_out_are_not_chat_fields(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "%s": "something"}' % name.encode())
    assert caught.value.param == name


def test_refused_parts_are_not_among_those_that_are_served() -> None:
    assert set(PARTS) & set(REFUSED_PARTS) == set()


def test_parameters_that_the_page_denies_are_refused() -> None:
    row = next(line for line in API_PAGES.splitlines() if "would change the answer |" in line)
    named = re.findall(r"`(\w+)`", row.split("|")[1])
    assert named
    assert set(named) <= LATER.keys()


def test_routes_that_the_page_denies_are_absent() -> None:
    sentences = re.split(r"[.|]", API_PAGES)
    denied = [path for text in sentences if "not served" in text for path in re.findall(r"`(?:GET|POST) (/\S+)`", text)]
    assert denied
    assert set(denied) & {re.sub(r"{\w+}", "ID", path) for path in describe(["m"])["paths"]} == set()


@pytest.mark.ci
def test_flags_that_errors_of_a_start_name_exist(flags: dict[str, set[str]]) -> None:
    """An error that says what to do names flags, not fields of the code."""
    known = set().union(*flags.values()) | {"--config"}
    of_others = {"--head", "--disaggregation-mode"}  # Ray's and SGLang's
    names = {field.name for field in dataclasses.fields(EngineSettings)} | {"kv_cache_bytes"}
    for path, text in start_errors():
        unknown = [flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text) if flag not in known]
        assert [flag for flag in unknown if flag not in of_others] == [] or "--worker-tls-..." in text, (path, text)
        if path.is_relative_to(SOURCE / "engine"):
            assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)) & names == set(), (path, text)


def start_errors() -> Iterator[tuple[Path, str]]:
    """Yield the text of every StartupError in the source."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "StartupError":
                parts: list[Any] = [
                    part.value
                    for argument in node.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant)
                ]
                yield path, "".join(part for part in parts if isinstance(part, str))
