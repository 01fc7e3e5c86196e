"""What the router chose is counted as an operator reads it."""

import logging
from random import Random

import numpy as np
import pytest
from fronts import DESCRIPTION
from prometheus_client import CollectorRegistry

from saccade.connectors.native.client import WorkerClient
from saccade.fleet.cost import Policy
from saccade.fleet.decision_metrics import MAX_REASONS, OTHER_REASONS, DecisionMetrics
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import Overlaps
from saccade.fleet.pool import Model
from saccade.fleet.router import Booking, Option, RoutedPrompt, Router
from saccade.protocol.exactness import EXACT, Exactness

PARTITION = Partition(bytes(32), 16)
KEYS = [bytes([number]) * 16 for number in range(10)]
PROMPT = RoutedPrompt(170, {PARTITION: KEYS})
WORKERS = (WorkerClient("unix:/a"), WorkerClient("unix:/b"))
OPTIONS = [Option(worker.url, PARTITION) for worker in WORKERS]
SILENT = Exactness("TEXT_PREFIX", "it hashes images by itself")


class Decisions:
    """A router over two workers, and the metrics of what it chooses."""

    def __init__(self, policy: Policy, exactness: Exactness = EXACT) -> None:
        self.exactness = exactness
        self.registry = CollectorRegistry()
        self.metrics = DecisionMetrics(self.registry, lambda _: self.exactness)
        self.model = Model("m", DESCRIPTION, WORKERS)
        self.router = Router(policy, BlockIndex(1 << 20), Random(0))
        self.rows = np.array([self.router.describe(option) for option in OPTIONS])
        self.held = {"unix:/a": 2, "unix:/b": 9}

    def place(self, *, serves: bool = True) -> Booking:
        overlaps = Overlaps(
            np.array(list(self.held.values())), np.ones(2, np.bool_), np.zeros((0, 2), np.bool_), np.zeros(2, np.int64)
        )
        booking = self.router.book(PROMPT.among(self.rows, overlaps), now=0)
        worker = WORKERS[booking.row]
        held_share = self.metrics.observe(self.model, worker, PROMPT.num_tokens, booking, choice_seconds=0.001)
        if serves:
            self.metrics.first_token("m", held_share)
        return booking

    def value(self, name: str, **labels: str) -> float:
        """A sample of the model, or with *labels*; 0 where there is none."""
        return self.registry.get_sample_value(f"saccade_router_{name}", labels or {"model_name": "m"}) or 0.0


def test_the_best_choice_loses_nothing() -> None:  # E6
    decisions = Decisions("cost")
    assert decisions.place().worker == "unix:/b"
    assert decisions.value("kv_hit_rate_count") == 1
    assert decisions.value("kv_hit_rate_sum") == pytest.approx(144 / 170)
    assert decisions.value("overlap_blocks_lost_total") == 0
    assert decisions.value("non_max_overlap_selections_total") == 0


def test_a_request_that_is_sent_again_has_one_hit_rate() -> None:  # E6
    decisions = Decisions("cost")
    assert decisions.place(serves=False).worker == "unix:/b"
    decisions.held["unix:/b"] = 0
    assert decisions.place().worker == "unix:/a"
    assert decisions.value("kv_hit_rate_count") == 1
    assert decisions.value("kv_hit_rate_sum") == pytest.approx(32 / 170)


def test_blocks_of_a_worker_that_was_passed_over_are_lost() -> None:
    decisions = Decisions("round_robin")
    assert [decisions.place().worker for _ in range(2)] == ["unix:/a", "unix:/b"]
    assert decisions.value("kv_hit_rate_sum") == pytest.approx((32 + 144) / 170)
    assert decisions.value("overlap_blocks_lost_total") == 7
    assert decisions.value("non_max_overlap_selections_total") == 1


def test_inexact_choice_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:  # E5
    caplog.set_level(logging.INFO)
    decisions = Decisions("cost", SILENT)
    for _ in range(3):
        decisions.place()
    labels = {"model_name": "m", "exactness": "TEXT_PREFIX", "reason": SILENT.reason}
    assert decisions.value("inexact_total", **labels) == 3
    assert decisions.value("kv_hit_rate_count") == 0
    assert caplog.text.count(f"worker unix:/b, whose caches are TEXT_PREFIX: {SILENT.reason}") == 1


def test_number_of_reasons_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    decisions = Decisions("cost", SILENT)
    for number in range(MAX_REASONS + 10):
        decisions.exactness = Exactness("DEGRADED", f"reason {number}")
        decisions.place()
    labels = {"model_name": "m", "exactness": "DEGRADED"}
    assert decisions.value("inexact_total", reason="reason 0", **labels) == 1
    assert decisions.value("inexact_total", reason=OTHER_REASONS, **labels) == 10
    assert caplog.text.count("requests go to worker") == MAX_REASONS
    # The series of a worker stay when it is gone.
    decisions.metrics.forget("unix:/b")
    decisions.exactness = Exactness("DEGRADED", "a new reason")
    decisions.place()
    assert decisions.value("inexact_total", reason=OTHER_REASONS, **labels) == 11


def test_stages_are_timed() -> None:
    decisions = Decisions("cost")
    for _ in range(2):
        decisions.place()
    with decisions.metrics.stage("keys"):
        pass
    counts = {stage: decisions.value("decision_seconds_count", stage=stage) for stage in ("keys", "lookup", "choice")}
    assert counts == {"keys": 1, "lookup": 0, "choice": 2}
