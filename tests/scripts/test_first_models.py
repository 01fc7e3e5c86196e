"""The tables of first models are what their script computes, from shapes that give the releases' own parameters."""

import first_models
import pytest

from saccade.engine.executor.loader import count_parameters

PARAMETERS = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": 256_484_928,
    "PaddlePaddle/PaddleOCR-VL-1.6": 958_588_736,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}
"""As the hub states them."""


@pytest.mark.ci
def test_pages_have_the_tables_that_the_script_computes() -> None:
    for page, table in first_models.TABLES.items():
        assert first_models.BEGIN + table() + first_models.END in page.read_text()


@pytest.mark.ci
def test_shapes_give_the_parameters_of_the_releases() -> None:
    counts = {
        model.name: count_parameters(first_models.empty(model)[1]) + model.num_unused for model in first_models.MODELS
    }
    assert counts == PARAMETERS
