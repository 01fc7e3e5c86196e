"""Models that read text only: logits and greedy ids against transformers', in chunks and from the prefix cache."""

import warnings
from pathlib import Path

import engines
import pytest
from checkpoints import TEXTS
from oracle_checks import check, check_fresh_and_cached
from references.networks import Oracle, TextOracle


@pytest.fixture(scope="module", params=TEXTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        return TEXTS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    """The reference with the checkpoint's weights."""
    return TextOracle(folder)


@pytest.mark.parametrize("chunk", [7, 2048])
def test_fresh_and_cached_chunks_equal_the_reference(folder: Path, oracle: Oracle, chunk: int) -> None:
    check_fresh_and_cached(oracle, folder, [53], chunk)


def test_long_answers_equal_the_reference(folder: Path, oracle: Oracle) -> None:
    subject = engines.engine(folder, max_num_batched_tokens=7, max_num_seqs=4)
    logits = engines.record_logits(subject)
    asked = [engines.request(folder, [23 + 9 * number], str(number), number, max_tokens=64) for number in range(4)]
    answers = engines.drain(subject, *asked).answers
    for one in asked:
        check(oracle, one, answers[one.request_id].token_ids, logits[one.request_id])
