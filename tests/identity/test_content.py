"""An image is known by its bytes and by how they are processed. # F3"""

import pytest

from saccade.identity.content import HASH_BYTES, content_hash, files_digest, processor_fingerprint

SETTINGS = {"patch_size": 16, "min_pixels": 1024}


def test_hash_depends_on_bytes_settings_files_and_decoder() -> None:  # [eng] 9, 10
    fingerprints = [
        processor_fingerprint(SETTINGS, b"files", "decoder 1"),
        processor_fingerprint({**SETTINGS, "min_pixels": 2048}, b"files", "decoder 1"),
        processor_fingerprint(SETTINGS, b"other", "decoder 1"),
        processor_fingerprint(SETTINGS, b"files", "decoder 2"),
    ]
    hashes = {content_hash(encoded, fingerprint) for encoded in (b"a", b"b") for fingerprint in fingerprints}
    assert len(hashes) == 8
    assert {len(known) for known in hashes} == {HASH_BYTES}


def test_order_of_settings_does_not_matter() -> None:
    backwards = dict(reversed(SETTINGS.items()))
    assert processor_fingerprint(SETTINGS, b"", "") == processor_fingerprint(backwards, b"", "")


def test_boundaries_between_parts_change_the_hash() -> None:
    assert content_hash(b"ab", b"c") != content_hash(b"a", b"bc")
    assert files_digest({"a": b"bc"}) != files_digest({"ab": b"c"})
    assert files_digest({"a": b"1", "b": b"2"}) == files_digest({"b": b"2", "a": b"1"})


def test_settings_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        processor_fingerprint({"scale": float("nan")}, b"", "")
