"""vLLM's tests of its server, sent to Saccade's."""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from judges.archives import take
from judges.judge import Judge
from judges.outcomes import Outcome
from judges.pytest_suite import Suite, run_suite
from judges.servers import model_server, tiny_model
from judges.suites.vllm_archive import ARCHIVE
from saccade.cli.bundled import bundled

STAND_INS = Path(__file__).parents[1] / "stand_ins"
ENTRYPOINTS = "tests/entrypoints"
OPENAI = f"{ENTRYPOINTS}/openai"
SHARED = f"{ENTRYPOINTS}/conftest.py"
RUN_SECONDS = 540


@dataclass(frozen=True)
class Group:
    """Tests that one server takes."""

    model: Callable[[Path], Path]
    """Writes the model into a folder, and returns its folder."""
    names: tuple[str, ...]
    """What the tests call their models; answers have the first."""
    flags: tuple[str, ...]
    tests: tuple[str, ...]
    support: tuple[str, ...] = ()
    """Files that the tests import."""

    def run(self, cache: Path, skips: frozenset[str]) -> Iterable[Outcome]:
        """Run the tests in Saccade's own environment, against a server with the model."""
        folder = take(ARCHIVE, (*self.tests, *self.support, SHARED), cache)
        options = ("-q", "-p", "vllm_server_stand_ins", "-p", "no:schemathesis", "-W", "ignore")
        # A limit that ends a report, not a test, ends the run.
        limits = ("--timeout", "90", "-o", "timeout_func_only=true")
        places = ("-c", "/dev/null", "--rootdir", str(folder))
        paths = (STAND_INS / "vllm_servers", STAND_INS / "vllm", folder)
        with tempfile.TemporaryDirectory() as scratch:
            model = self.model(Path(scratch))
            with model_server(model, self.names, *self.flags) as server:
                told = {"JUDGE_SERVER": server.url, "JUDGE_CHECKPOINT": str(model), "HF_HUB_OFFLINE": "1"}
                suite = Suite(Path(sys.executable), folder, self.tests, (*options, *limits, *places), told, paths)
                return run_suite(suite, skips, RUN_SECONDS)


def files(folder: str, *names: str) -> tuple[str, ...]:
    """Files of tests in *folder*, by what follows test_ in their names."""
    return tuple(f"{folder}/test_{name}.py" for name in names)


def packages(*folders: str) -> tuple[str, ...]:
    """What makes packages of *folders*, from which tests import one another."""
    return tuple(f"{folder}/__init__.py" for folder in ("tests", ENTRYPOINTS, *folders))


CHATS = Group(
    model=tiny_model("qwen3_vl"),
    names=(
        "Qwen/Qwen3-0.6B",
        "HuggingFaceH4/zephyr-7b-beta",
        "Qwen/Qwen2-1.5B-Instruct",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "google/translategemma-4b-it",
        "openai-community/gpt2",
    ),
    flags=("--max-model-len", "1536"),
    tests=(
        *files(
            f"{OPENAI}/chat_completion",
            "chat",
            "chat_completion",
            "chat_echo",
            "chat_logit_bias_validation",
            "enable_force_include_usage",
            "extra_content_fields",
            "logprob_token_ids",
            "root_path",
        ),
        *files(f"{OPENAI}/completion", "completion", "prompt_validation", "token_in_token_out"),
        *files(f"{OPENAI}/models", "models"),
        *files(OPENAI, "chunked_prompt", "return_token_ids", "return_tokens_as_ids"),
    ),
    support=packages(OPENAI, *(f"{OPENAI}/{name}" for name in ("chat_completion", "completion", "models"))),
)
RESPONSES, TOKENIZE = f"{OPENAI}/responses", f"{ENTRYPOINTS}/serve/tokenize"
MULTIMODAL = f"{ENTRYPOINTS}/multimodal"
TOOL_USE = "tests/tool_use"
APIS = Group(
    model=lambda _: bundled("model"),
    names=(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-8B",
        "microsoft/Phi-3.5-vision-instruct",
        "NousResearch/Hermes-3-Llama-3.1-8B",
        "Team-ACE/ToolACE-8B",
        "ibm-granite/granite-3.0-8b-instruct",
        "ibm-granite/granite-3.1-8b-instruct",
        "internlm/internlm2_5-7b-chat",
        "meta-llama/Llama-3.2-3B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "claude-3-7-sonnet-latest",
    ),
    flags=("--allowed-media-networks", "127.0.0.0/8"),
    tests=(
        *files(RESPONSES, "basic", "function_call", "namespace_tool_separator", "simple", "stateful"),
        *files(RESPONSES, "structured_output"),
        *files(f"{ENTRYPOINTS}/anthropic", "messages"),
        *files(TOKENIZE, "tokenization", "tokenization_vlm", "tokenize_then_chat_vlm"),
        *files(f"{MULTIMODAL}/openai/chat_completion", "vision"),
        *files(f"{MULTIMODAL}/openai/responses", "image"),
        *files(f"{OPENAI}/chat_completion", "completion_with_function_calling"),
        *files(TOOL_USE, "chat_completions", "parallel_tool_calls", "tool_calls"),
    ),
    support=(
        *packages(OPENAI, RESPONSES, f"{OPENAI}/chat_completion", f"{ENTRYPOINTS}/anthropic"),
        *packages(f"{ENTRYPOINTS}/serve", TOKENIZE, MULTIMODAL, f"{MULTIMODAL}/openai", TOOL_USE),
        *packages(f"{MULTIMODAL}/openai/chat_completion", f"{MULTIMODAL}/openai/responses"),
        f"{RESPONSES}/conftest.py",
        f"{MULTIMODAL}/conftest.py",
        f"{TOOL_USE}/conftest.py",
        f"{TOOL_USE}/utils.py",
    ),
)
REASONING = Group(
    model=tiny_model("qwen3_5"),
    names=("Qwen/Qwen3-0.6B", "Qwen/Qwen3.5-35B-A3B-FP8"),
    flags=("--max-model-len", "1536"),
    tests=files(f"{OPENAI}/chat_completion", "include_reasoning", "thinking_token_budget"),
    support=packages(OPENAI, f"{OPENAI}/chat_completion"),
)
CHATS_SAY = """\
15 files of tests of chats, completions and models. A random Qwen3-VL, served by Saccade under the names of all their
models, stands in the place of vLLM's servers. The flags that these start with are not passed on. Left out are batches
of chats, and files that need LoRA adapters or embeddings of prompts, or look at the inside of vLLM only."""
APIS_SAY = """\
16 files of tests of Responses, Messages, tokenization, images and tools. The bundled model has the names of all their
models. Left out are files that look at the inside of vLLM only, and audio, videos and tools that a server runs."""
REASONING_SAY = """\
Two files of tests of reasoning and its budget, against a random Qwen3.5. Left out are files that look at the inside of
vLLM only."""
CHATS_JUDGE = Judge("vllm-chats", ARCHIVE.release, CHATS_SAY, CHATS.run)
APIS_JUDGE = Judge("vllm-apis", ARCHIVE.release, APIS_SAY, APIS.run)
REASONING_JUDGE = Judge("vllm-reasoning", ARCHIVE.release, REASONING_SAY, REASONING.run)
