"""`saccade demo --workers 2`: a fleet that loses a worker."""

import re

import psutil
import pytest

from saccade.cli.main import run

SHOWN = re.compile(r"(\w+) +(\S+)-\w+\.png, by (worker \d) \(.*?\), (\d+) of \d+ tokens cached")


@pytest.mark.ci
def test_repeats_go_to_the_holder_and_a_killed_worker_is_no_loss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    before = set(psutil.Process().children(recursive=True))
    assert run(["demo", "--workers", "2"]) == 0
    shown = capsys.readouterr().out
    answers = SHOWN.findall(shown)
    num_images = len(answers) // 2
    assert num_images > 2
    assert all(text == image for text, image, _, _ in answers)
    assert all(int(num_cached) == 0 for *_, num_cached in answers[:num_images])
    assert all(int(num_cached) > 0 for *_, num_cached in answers[num_images:])
    assert [worker for _, _, worker, _ in answers[:num_images]] == [worker for _, _, worker, _ in answers[num_images:]]
    text, image, worker, _ = answers[-1]
    assert re.search(rf"kill -9 \d+`, {worker}, .*\n{text} +{image}-\w+\.png, by another than {worker}\n", shown)
    assert set(psutil.Process().children(recursive=True)) == before
