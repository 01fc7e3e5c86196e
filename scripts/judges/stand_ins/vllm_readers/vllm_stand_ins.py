"""A plugin of pytest: what vLLM's tests of parsers import of vLLM, in front of Saccade's reader of answers.

The protocol's classes hold what they are given. Parser classes feed the reader. Everything else of vLLM can be
imported, and fails when it is used.
"""

import importlib
from typing import Any

import pytest
import stand_in_parsers
import stand_in_protocol
import transformers
from stand_in_modules import replace_modules
from stand_in_tokenizer import detokenized, tokenizer_of

CONSTANTS = {
    "TOOL_CALL_START": {"gemma4": "<|tool_call>", "": "<tool_call>"},
    "TOOL_CALL_END": {"gemma4": "<tool_call|>", "": "</tool_call>"},
    "STRING_DELIM": {"": '<|"|>'},
    "THINK_START": {"": "<think>"},
    "THINK_END": {"": "</think>"},
}
FUNCTIONS = {"get_tokenizer": tokenizer_of, "detokenize_incrementally": detokenized}


def find(module: str, name: str) -> Any:
    """Return what stands for *name*; raises LookupError."""
    for source in (stand_in_protocol, stand_in_parsers):
        if hasattr(source, name):
            return getattr(source, name)
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    by_module = CONSTANTS[name]
    return by_module.get(module.rpartition(".")[2], by_module[""])


replace_modules(lambda name: name.partition(".")[0] in ("vllm", "xgrammar"), find)
# Tests find the engines by going through their module.
vars(importlib.import_module("vllm.parser.engine.registered_adapters")).update(stand_in_parsers.ENGINES)
transformers.AutoTokenizer.from_pretrained = staticmethod(tokenizer_of)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let traces be built without a trial: one that fails would end the collection, and the tests try all."""
    if collector.nodeid.endswith("test_replay.py"):
        from tests.parser.engine import trace_builder  # of vLLM's suite

        trace_builder._validate_sample = lambda *given, **named: None
