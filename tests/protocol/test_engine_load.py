"""What an engine reports is written down in one table, from which its counters and the metrics come."""

import msgspec

from saccade.engine.core.counters import Counters
from saccade.protocol.engine_load import Load, Sums, engine_metrics

SHOWN_BY_LABEL = {
    "step_tokens_total",
    "steps_by_tokens",
    "schedule_seconds_total",
    "batch_seconds_total",
    "encode_seconds_total",
    "network_seconds_total",
    "postprocess_seconds_total",
    "between_states_tokens_total",
    "evicted_state_tokens_total",
    "evicted_window_tokens_total",
}
"""Fields of metrics that show several, each with a label or in a bucket."""


def test_every_field_but_draining_is_shown_by_a_metric() -> None:
    shown = {field for _, field in engine_metrics()} - {"encoder_lookups_total", "kv_usage"}
    assert shown.isdisjoint(SHOWN_BY_LABEL)
    assert shown | SHOWN_BY_LABEL | {"draining"} == {*Load.__struct_fields__}


def test_names_of_metrics_are_unique_and_tell_counters() -> None:
    metrics = [metric for metric, _ in engine_metrics()]
    assert len({metric.name for metric in metrics}) == len(metrics)
    assert all((metric.kind == "counter") == field.endswith("_total") for metric, field in engine_metrics())


def test_counters_are_the_sums_of_a_load() -> None:
    counters = Counters(**{name: number for number, name in enumerate(Sums.__struct_fields__)})
    sums = {name: value for name, value in msgspec.structs.asdict(counters).items() if name != "steps_by_tokens"}
    load = Load(**sums)
    assert {name: getattr(load, name) for name in sums} == sums
    assert {*sums} == {*Sums.__struct_fields__}
