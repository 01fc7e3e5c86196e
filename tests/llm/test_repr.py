"""What a notebook shows of an LLM, and the version of the package."""

import importlib.metadata

import pytest

import saccade


def test_an_llm_says_its_model_and_state() -> None:
    assert repr(saccade.AsyncLLM()) == "<saccade.AsyncLLM saccade-reader: not started, or closed>"
    assert repr(saccade.AsyncLLM("./model")) == "<saccade.AsyncLLM ./model: not started, or closed>"


def test_the_package_has_its_version() -> None:
    assert saccade.__version__ == importlib.metadata.version("saccade-vlm")
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        saccade.version  # noqa: B018
