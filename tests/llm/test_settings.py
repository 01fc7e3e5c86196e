"""Settings by name."""

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.llm.settings import ENGINE, MEDIA, SERVER, Settings, read_settings
from saccade.media.header import MediaLimits


def test_settings_have_the_names_and_values_of_flags() -> None:
    values = {
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 3},
        "served_model_name": ["a", "b"],
        "allowed_local_media_path": None,
    }
    read = read_settings(values)
    assert (read.engine.max_model_len, read.engine.enable_prefix_caching) == (4096, False)
    assert read.engine.served_model_name == ("a", "b")
    assert read.media.media_limits == MediaLimits(3)
    assert read_settings({}) == Settings(ENGINE, MEDIA, SERVER)


@table(
    ("values", "sentence"),
    [
        ({"max_modle_len": 1}, "There is no setting max_modle_len; did you mean max_model_len?"),
        ({"colour": 1}, "There is no setting colour; docs/configuration.md"),
        ({"port": 8000}, "There is no setting port"),
        ({"max_model_len": 0}, 'Invalid value "0" for max_model_len. Must be >= 1.'),
        ({"max_model_len": "long"}, "Invalid value for max_model_len: must be a whole number"),
        ({"device": "tpu"}, 'Invalid value "tpu" for device. Choose from'),
        ({"dtype": "int8"}, 'Invalid value "int8" for dtype. Choose from'),
        ({"kv_cache_dtype": "fp8_e5m2"}, 'Invalid value "fp8_e5m2" for kv_cache_dtype. Choose from'),
        ({"block_size": 0}, 'Invalid value "0" for block_size. Must be >= 1.'),
        ({"kv_cache_memory_bytes": 0}, 'Invalid value "0" for kv_cache_memory_bytes. Must be >= 1.'),
        ({"gpu_memory_utilization": 0.0}, 'Invalid value "0.0" for gpu_memory_utilization. Must be > 0.'),
        ({"gpu_memory_utilization": 1.5}, 'Invalid value "1.5" for gpu_memory_utilization. Must be <= 1.'),
    ],
)
def test_wrong_setting_is_named(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(StartupError) as error:
        read_settings(values)
    assert error.value.message.startswith(sentence)
