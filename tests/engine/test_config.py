"""The limits of a step: what was set, else the defaults of the device and the kind of model."""

from tables import table

from saccade.engine.config import EngineConfig, Limits


@table(
    ("settings", "device", "has_states", "limits"),
    [
        ({}, "cpu", False, (64, 2048, 1024)),
        ({}, "cuda", False, (256, 8192, 16384)),
        ({}, "cuda", True, (64, 8192, 16384)),
        ({"max_num_seqs": 128}, "cuda", True, (128, 8192, 16384)),
        # Every sequence of a step has a token, whichever of the two is set.
        ({"max_num_batched_tokens": 24}, "cuda", False, (24, 24, 16384)),
        ({"max_num_seqs": 4096, "encode_budget_patches": 9}, "cpu", False, (4096, 4096, 9)),
    ],
)
def test_limits_of_a_step_are_those_of_the_device(
    settings: dict[str, int], device: str, has_states: bool, limits: tuple[int, int, int]
) -> None:
    config = EngineConfig("folder", "model", **settings)  # type: ignore[arg-type]
    config.check()
    assert config.limits(device, has_states=has_states) == Limits(*limits)
