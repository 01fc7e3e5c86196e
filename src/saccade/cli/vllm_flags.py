"""The flags of `vllm serve` and Saccade's support for each; the parser and docs/from-vllm.md use this declaration.

A flag that would change an answer is never accepted without effect, unless its value requests Saccade's own behaviour
(`same_values`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Takes = Literal["nothing", "one", "many"]
COMMANDS = frozenset({"serve", "worker", "gateway"})
"""The commands that take flags of `vllm serve`."""


class Support(StrEnum):
    """How Saccade handles a flag."""

    SERVED = "served as"
    NO_EFFECT = "accepted without effect"
    NOT_YET = "not yet"


@dataclass(frozen=True)
class VllmFlag:
    """A flag of `vllm serve`, all its *names*, and a *sentence* about Saccade's behaviour.

    *ours* is Saccade's name of a SERVED flag. *same_values* are accepted without effect for every *support*.
    """

    names: tuple[str, ...]
    support: Support
    sentence: str
    takes: Takes = "one"
    same_values: tuple[str, ...] = ()
    ours: str = ""


def _served(names: str, sentence: str, ours: str = "", takes: Takes = "one") -> VllmFlag:
    first, *others = names.split()
    return VllmFlag((first, *others), Support.SERVED, sentence, takes, ours=ours or first)


def _no_effect(names: str, sentence: str, takes: Takes = "nothing") -> VllmFlag:
    return VllmFlag(tuple(names.split()), Support.NO_EFFECT, sentence, takes)


def _not_yet(names: str, sentence: str, same: str = "", takes: Takes = "one") -> VllmFlag:
    return VllmFlag(tuple(names.split()), Support.NOT_YET, sentence, takes, tuple(same.split()))


SAME_NAME = "Same name, same meaning."
ONE_STAGE = "A model is cut with `--tensor-parallel-size` and `--attention-tensor-parallel-size`, in no other way."
WHOLE_EXPERTS = "Each of `--tensor-parallel-size` processes holds whole experts, if they can share them equally."
EAGER = (
    "Steps run eagerly, except decodes with `--cuda-graphs` and the vision encoder with `--mm-encoder-cuda-graph`; "
    "models are not compiled."
)
OWN_SCHEDULER = "The scheduler has other settings: `--max-num-batched-tokens`, `--max-num-seqs`, `--max-num-waiting`."
GRAMMARS = "Requests may have `response_format` and `structured_outputs`; llguidance, vLLM's `guidance`, compiles them."
NO_TOOLS = "Tools run at the client; their calls are read by the parsers that are built in."
NO_LORA = "A model answers with its own weights, never with those of an adapter."
NO_TLS = "The gateway serves plain HTTP; put a proxy with TLS in front of it."
OWN_FILES = "The files of the model's folder are used unchanged; edit them there."
SERVED = (
    _served("--model", "The model may also be the first argument: `saccade serve MODEL`."),
    _served("--served-model-name", "One name or more; the first is the `model` of every answer.", takes="many"),
    _served("--config", "A TOML file instead of a YAML one."),
    _served("--host", SAME_NAME),
    _served("--port", SAME_NAME),
    _served(
        "--api-key",
        "Repeat the flag for several keys. Every route except the health checks requires one.",
        takes="many",
    ),
    _served("--tool-call-parser", "`hermes`, `qwen3_coder` and `kimi_k2`; `auto`, the default, knows each family's."),
    _served("--reasoning-parser", "`qwen3`, `deepseek_r1` and `kimi_k2` read `<think>`, as `auto` does."),
    _served("--allowed-origins", "None by default; vLLM allows every origin."),
    _served("--trust-request-chat-template", SAME_NAME, takes="nothing"),
    _served("--shutdown-timeout", SAME_NAME),
    _served("--max-model-len", "A whole number of tokens, not `32k` or `auto`."),
    _served("--max-num-seqs", SAME_NAME),
    _served("--max-num-batched-tokens", SAME_NAME),
    _served("--gpu-memory-utilization", SAME_NAME),
    _served("--kv-cache-memory-bytes", "A whole number of bytes."),
    _served("--num-gpu-blocks-override", "Use `--kv-cache-memory-bytes`.", "--kv-cache-memory-bytes"),
    _served("--block-size", SAME_NAME),
    _served("--tensor-parallel-size -tp", "Same name, same meaning, on the GPUs of one machine."),
    _served("--mm-encoder-tp-mode", "Same name, same meaning; `data` by default, where vLLM has `weights`."),
    _served("--enable-prefix-caching", "On by default; `--no-enable-prefix-caching` turns it off.", takes="nothing"),
    _served("--dtype", "Auto is the checkpoint's own, but float32 on a CPU without bfloat16."),
    _served("--kv-cache-dtype", "`auto` or `fp8`, which is e4m3; auto is never fp8, whatever the checkpoint says."),
    _served("--attention-backend", "Same name, other values: `saccade serve --help` lists them."),
    _served("--mm-encoder-attn-backend", "Same name, other values: `saccade serve --help` lists them."),
    _served(
        "--trust-remote-code", "Accepted with a warning: code that ships with a model is never run.", takes="nothing"
    ),
    _served(
        "--limit-mm-per-prompt", "JSON as in vLLM, for `image` and `video`; by default 16 and 4, where vLLM allows 999."
    ),
    _served(
        "--language-model-only",
        'Use `--limit-mm-per-prompt \'{"image": 0, "video": 0}\'`.',
        "--limit-mm-per-prompt",
        "nothing",
    ),
    _served("--mm-processor-cache-gb", "Prepared images are kept in shared memory."),
    _served(
        "--disable-mm-preprocessor-cache", "Use `--mm-processor-cache-gb 0`.", "--mm-processor-cache-gb", "nothing"
    ),
    _served("--allowed-media-domains", "Repeat the flag for several hosts.", takes="many"),
    _served("--allowed-local-media-path", SAME_NAME),
    _served("--uvicorn-log-level", "Use `--log-level`.", "--log-level"),
    _served("--enable-log-requests", "Use `--log-level INFO`; prompts are never logged.", "--log-level", "nothing"),
    _served("--api-server-count -asc", "Use `--gateway-processes`.", "--gateway-processes"),
    _served("--revision", "Write the revision after the hub id: `saccade serve MODEL@REVISION`.", "MODEL@REVISION"),
    _served("--download-dir", "Set HF_HUB_CACHE in the environment.", "HF_HUB_CACHE"),
    _served("--hf-token", "Set HF_TOKEN in the environment, which `ps` does not show.", "HF_TOKEN"),
    _served("--grpc", "`saccade worker MODEL` serves gRPC.", "saccade worker", "nothing"),
)
NO_EFFECT = (
    _no_effect("--enable-auto-tool-choice", "Requests may have tools wherever the model's template takes them."),
    _no_effect("--exclude-tools-when-tool-choice-none", "Prompts always leave these tools out."),
    _no_effect("--enable-expert-parallel -ep", WHOLE_EXPERTS),
    _no_effect("--enforce-eager", EAGER),
    _no_effect("--max-seq-len-to-capture --max-cudagraph-capture-size", EAGER, "one"),
    _no_effect("--cudagraph-capture-sizes --cuda-graph-sizes", EAGER, "many"),
    _no_effect("--compilation-config -cc --optimization-level -O", EAGER, "one"),
    _no_effect("-O0 -O1 -O2 -O3", EAGER),
    _no_effect("--swap-space", "KV blocks are never moved to the host's memory.", "one"),
    _no_effect("--enable-chunked-prefill", "Long prompts are always computed in chunks."),
    _no_effect("--max-num-partial-prefills --max-long-partial-prefills", OWN_SCHEDULER, "one"),
    _no_effect("--long-prefill-token-threshold --num-scheduler-steps --num-lookahead-slots", OWN_SCHEDULER, "one"),
    _no_effect("--scheduler-delay-factor --preemption-mode", OWN_SCHEDULER, "one"),
    _no_effect("--async-scheduling --use-v2-block-manager", OWN_SCHEDULER),
    _no_effect("--disable-cascade-attn", "There is no cascade attention."),
    _no_effect("--prefix-caching-hash-algo", "Block keys are BLAKE3 hashes of the blocks' content.", "one"),
    _no_effect("--distributed-executor-backend", "Each rank is a process of this machine.", "one"),
    _no_effect(
        "--disable-custom-all-reduce --worker-use-ray --engine-use-ray", "Ranks communicate by torch.distributed."
    ),
    _no_effect("--disable-frontend-multiprocessing", "Gateway and engine are always separate processes."),
    _no_effect("--safetensors-load-strategy", "Weights are always mapped into memory.", "one"),
    _no_effect("--use-tqdm-on-load", "The progress of loading is always shown."),
    _no_effect("--code-revision", "Code that ships with a model is never run.", "one"),
    _no_effect("--skip-mm-profiling", "The start on a GPU always measures the memory that images take."),
    _no_effect("--mm-processor-cache-type --mm-shm-cache-max-object-size-mb", "The cache is in shared memory.", "one"),
    _no_effect(
        "--disable-log-requests --no-enable-log-requests",
        "`saccade serve` logs requests with `--log-level INFO`.",
    ),
    _no_effect("--disable-uvicorn-access-log", "The log of requests, with `--log-level INFO`, is the access log."),
    _no_effect(
        "--disable-access-log-for-endpoints", "The log of requests, with `--log-level INFO`, is the access log.", "one"
    ),
    _no_effect("--disable-log-stats --aggregate-engine-logging", "Statistics are in `/metrics`."),
    _no_effect("--max-log-len", "Prompts are never logged.", "one"),
    _no_effect("--enable-request-id-headers", "Every answer has an `x-request-id`."),
    _no_effect("--enable-prompt-tokens-details", "`usage` always has `prompt_tokens_details`."),
    _no_effect("--h11-max-incomplete-event-size --h11-max-header-count", "A request's head may have 64 KiB.", "one"),
)
NOT_YET = (
    _not_yet("--pipeline-parallel-size -pp", ONE_STAGE, "1"),
    _not_yet("--data-parallel-size -dp", "Start one `saccade worker` per copy behind one `saccade gateway`.", "1"),
    _not_yet("--headless", "Start a `saccade worker` on each machine and one `saccade gateway`.", takes="nothing"),
    _not_yet(
        "--quantization -q",
        "The checkpoint says how its weights are quantised; weights are not quantised while they are loaded.",
        "none compressed-tensors modelopt modelopt_fp4",
    ),
    _not_yet("--calculate-kv-scales", "An fp8 KV cache has the checkpoint's scales, else 1.", takes="nothing"),
    _not_yet("--cpu-offload-gb", "Weights are all on the device.", "0"),
    _not_yet("--kv-offloading-size", "KV blocks are never moved to the host's memory."),
    _not_yet("--load-format", "Weights are read from safetensors files only.", "auto safetensors"),
    _not_yet("--tokenizer --tokenizer-revision", OWN_FILES),
    _not_yet("--tokenizer-mode --config-format", OWN_FILES, "auto hf"),
    _not_yet("--skip-tokenizer-init", OWN_FILES, takes="nothing"),
    _not_yet("--hf-config-path --hf-overrides --rope-scaling --rope-theta", OWN_FILES),
    _not_yet("--disable-sliding-window", OWN_FILES, takes="nothing"),
    _not_yet("--generation-config", "The model's own generation_config.json gives the defaults of sampling.", "auto"),
    _not_yet("--override-generation-config", "Send the sampling parameters with each request."),
    _not_yet("--seed", "Send `seed` with each request whose answer must be reproducible."),
    _not_yet("--max-logprobs", "A request may ask for 20 log probabilities a token.", "20"),
    _not_yet(
        "--logprobs-mode", "Log probabilities are computed from the model's logits, before temperature.", "raw_logprobs"
    ),
    _not_yet(
        "--chat-template", "The model's own template is used; put another into its folder as chat_template.jinja."
    ),
    _not_yet(
        "--chat-template-content-format", "The form of content that the template takes is detected at start.", "auto"
    ),
    _not_yet("--default-chat-template-kwargs", "Send `chat_template_kwargs` with each request."),
    _not_yet("--response-role", "Answers have the role `assistant`.", "assistant"),
    _not_yet("--tool-parser-plugin --tool-server", NO_TOOLS),
    _not_yet("--guided-decoding-backend", GRAMMARS, "auto guidance"),
    _not_yet("--structured-outputs-config", GRAMMARS),
    _not_yet("--speculative-config -sc", "A step computes one token of each answer."),
    _not_yet("--scheduling-policy", "Requests have no priorities; tenants of `--api-keys-file` have.", "fcfs"),
    _not_yet("--stream-interval", "The tokens of each step are sent immediately.", "1"),
    _not_yet("--enable-lora --fully-sharded-loras", NO_LORA, takes="nothing"),
    _not_yet("--lora-modules", NO_LORA, takes="many"),
    _not_yet("--max-loras --max-lora-rank --max-cpu-loras", NO_LORA),
    _not_yet("--mm-processor-kwargs", "Send `mm_processor_kwargs` with each request."),
    _not_yet("--media-io-kwargs", "Send `media_io_kwargs` with each request; decoders cannot be selected."),
    _not_yet("--enable-mm-embeds", "Embeddings are not accepted in place of images.", takes="nothing"),
    _not_yet(
        "--interleave-mm-strings",
        "In templates that take strings, images stay at their position in the text.",
        takes="nothing",
    ),
    _not_yet("--video-pruning-rate", "All sampled frames are served."),
    _not_yet(
        "--task --runner --convert",
        "Saccade generates answers; it does not embed, score or classify.",
        "auto generate none",
    ),
    _not_yet("--model-impl", "Saccade has its own networks.", "auto"),
    _not_yet(
        "--kv-transfer-config --ec-transfer-config",
        "Use `saccade worker --role prefill` and `--role decode`.",
    ),
    _not_yet("--kv-events-config", "Workers stream the content of their caches over gRPC: `KvEvents`."),
    _not_yet("--uds", "The gateway listens on TCP; `saccade worker` has `--uds`."),
    _not_yet("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-ciphers", NO_TLS),
    _not_yet("--ssl-cert-reqs", NO_TLS, "0"),
    _not_yet("--enable-ssl-refresh", NO_TLS, takes="nothing"),
    _not_yet("--root-path", "Let a proxy in front of the gateway strip the path.", takes="one"),
    _not_yet("--middleware", "The gateway runs no third-party code; put a proxy in front of it."),
    _not_yet("--allow-credentials", "Web pages send the key in a header.", takes="nothing"),
    _not_yet(
        "--allowed-methods --allowed-headers",
        "Allowed origins may send GET, POST and DELETE with any header.",
        '["*"] *',
    ),
    _not_yet(
        "--disable-fastapi-docs", "`/openapi.json` is always served; with keys set it requires one.", takes="nothing"
    ),
    _not_yet("--enable-force-include-usage", "Send `stream_options.include_usage` with the request.", takes="nothing"),
    _not_yet("--return-tokens-as-token-ids", "Send `return_token_ids` with the request.", takes="nothing"),
    _not_yet("--enable-log-outputs", "Answers are never logged.", takes="nothing"),
    _not_yet("--log-config-file", "Use `--log-level`."),
    _not_yet(
        "--otlp-traces-endpoint --collect-detailed-traces",
        "`/metrics` has the times of the stages; there are no traces.",
    ),
    _not_yet(
        "--enable-sleep-mode --tokens-only --enable-tokenizer-info-endpoint", "There is no such route.", takes="nothing"
    ),
    _not_yet("--worker-cls --worker-extension-cls --additional-config", "Saccade runs no third-party code."),
)
FLAGS = (*SERVED, *NO_EFFECT, *NOT_YET)
SWITCHES = tuple(flag for flag in FLAGS if flag.takes == "nothing")


@dataclass(frozen=True)
class Arguments:
    """A command line without flags that have no effect, and the names of the removed flags."""

    kept: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


def find(name: str) -> VllmFlag | None:
    """Return vLLM's flag with *name*, as on a command line, or without its dashes as in a settings file.

    As in vLLM, `_` is the same as `-`, `--flag.key` sets a key of a JSON value, and `--no-flag` negates a flag without
    a value.
    """
    dashed = name if name.startswith("-") else f"--{name}"
    spelt = dashed.partition(".")[0].replace("_", "-")
    switch = spelt.replace("--no-", "--", 1)
    exact = (flag for flag in FLAGS if spelt in flag.names)
    return next(exact, None) or next((flag for flag in SWITCHES if switch in flag.names), None)


def take_out(arguments: Sequence[str]) -> Arguments:
    """Remove vLLM's flags that have no effect from a command line of Saccade."""
    if not arguments or arguments[0] not in COMMANDS:
        return Arguments(list(arguments))
    taken = Arguments()
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        flag = find(name) if token.startswith("-") else None
        if flag is None or flag.support is Support.SERVED:
            taken.kept.append(token)
            continue
        values = [value] if equals else _values(flag, rest)
        if _has_no_effect(flag, name, values):
            taken.without_effect.append(name)
            del rest[: 0 if equals else len(values)]
        else:
            taken.kept.append(token)
    return taken


def _values(flag: VllmFlag, rest: Sequence[str]) -> list[str]:
    """Return the values of *flag* at the start of *rest*."""
    if flag.takes == "one":
        return list(rest[:1])
    following = next((place for place, token in enumerate(rest) if token.startswith("-")), len(rest))
    return list(rest[:following]) if flag.takes == "many" else []


def _has_no_effect(flag: VllmFlag, name: str, values: Sequence[str]) -> bool:
    if flag.support is Support.NO_EFFECT:
        return True
    if flag.takes == "nothing":  # `--no-` and the name of another flag
        return name.replace("_", "-") not in flag.names
    return bool(values) and all(value in flag.same_values for value in values)


def explanation(name: str) -> str | None:
    """Return the explanation of a flag of vLLM that the command lacks; None if vLLM has no such flag."""
    flag = find(name)
    if flag is None:
        return None
    same = f" Accepted values: {', '.join(flag.same_values)}." if flag.same_values else ""
    match flag.support:
        case Support.NOT_YET:
            return f"{name} is not supported. {flag.sentence}{same}"
        case Support.NO_EFFECT:
            return f"{name} has no effect here. {flag.sentence}"
        case _:
            return f"{name} is not a flag of this command. {flag.sentence}"
