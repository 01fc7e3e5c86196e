"""The fingerprint of a model. Only workers with equal fingerprints compute equal KV blocks for equal tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from saccade import models
from saccade.config import MIB
from saccade.engine.config import EngineConfig
from saccade.engine.executor.weight_index import HF_QUANT_CONFIG, weight_files
from saccade.engine.executor.weight_index import WEIGHTS as WEIGHTS_FILE
from saccade.identity.content import files_digest
from saccade.models.bundled_model import BUNDLED_WEIGHTS
from saccade.models.files import engine_config, parse_json
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG

DIGEST_OF_WEIGHTS = b"saccade.weights.1"
"""The start of a digest of weights."""


def model_fingerprint(config: EngineConfig, files: ModelFiles) -> bytes:
    """Return 32 bytes that identify the model in *config*.model_dir, with the settings that change its KV blocks.

    *files* come from `read_model_files`. A new feature in `_features` does not change the fingerprint of a model
    without it. Raises StartupError.
    """
    start = b"saccade.model.1" + files_digest(files.files)
    return fingerprint(start, _weights(config), tuple(_features(config, files)))


def weights_digest(config: EngineConfig, files: ModelFiles) -> bytes:
    """Return 32 bytes that identify the weights, and the settings that change the network's results.

    Workers whose files differ without an effect on answers have different fingerprints, but the same digest.
    """
    return fingerprint(DIGEST_OF_WEIGHTS, _weights(config), tuple(_features(config, files)))


def has_bundled_weights(config: EngineConfig) -> bool:
    """Return whether the weights are those of the model that ships with Saccade, whatever folder and name they have."""
    file = Path(config.model_dir) / WEIGHTS_FILE
    is_read = config.load_format != "dummy" and file.is_file()
    return is_read and fingerprint(DIGEST_OF_WEIGHTS, [file]) == BUNDLED_WEIGHTS


def _weights(config: EngineConfig) -> list[Path]:
    return [] if config.load_format == "dummy" else weight_files(Path(config.model_dir))


def _features(config: EngineConfig, files: ModelFiles) -> Iterator[bytes]:
    if config.load_format == "dummy":
        yield b"dummy weights"
    quantisation = Path(config.model_dir) / HF_QUANT_CONFIG
    if quantisation.is_file():
        yield b"quantisation " + quantisation.read_bytes()
    family = models.family_of(parse_json(files, CONFIG))
    parsed = engine_config(files, models.families()[family], config.max_model_len)
    if factors := models.load_spec(family, parsed).rope_factors:
        yield b"rope factors " + factors.encode()
    if config.hf_overrides is not None:
        yield b"config " + config.hf_overrides.encode()
    if config.quantization is not None:
        yield b"quantization " + config.quantization.encode()
    if config.kv_cache_dtype != "auto":
        yield b"kv cache dtype " + config.kv_cache_dtype.encode()


def fingerprint(start: bytes, weights: Sequence[Path], features: Sequence[bytes] = ()) -> bytes:
    """Return 32 bytes that identify *start*, *weights* and *features*.

    It reads only the size, header, first and last MiB of each weights file, because checkpoints can be terabytes in
    size.
    """
    hasher = blake3(start)
    for path in weights:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header = file.read(min(int.from_bytes(prefix, "little"), size))
            first = file.read(MIB)
            file.seek(max(0, size - MIB))
            _add(hasher, path.name.encode(), size.to_bytes(8, "little"), prefix, header, first, file.read(MIB))
    if features:
        _add(hasher, b"features", *features)
    return hasher.digest()


def _add(hasher: blake3, *parts: bytes) -> None:
    """Add each part after its length, so that no two lists of parts have the same result."""
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
