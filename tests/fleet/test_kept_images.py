"""Images that were sent to workers which report none."""

from saccade.fleet.kept_images import MAX_MISSES, KeptImages


def test_the_oldest_images_beyond_a_workers_bytes_are_forgotten() -> None:  # F5
    kept = KeptImages()
    for key in (b"a", b"b"):
        kept.note_sent(1, [(key, 40)], 100)
    kept.note_sent(0, [(b"a", 40)], 100)
    kept.note_sent(1, [(b"a", 0)], 100)  # it is used again
    kept.note_sent(1, [(b"c", 40), (b"too large", 101)], 100)
    assert [kept.rows_of(key) for key in (b"a", b"b", b"c", b"too large")] == [0b01, 0, 0, 0]
    kept.note_sent(1, [(b"c", 40)], 100)
    assert [kept.rows_of(key) for key in (b"a", b"b", b"c")] == [0b01, 0, 0b10]


def test_a_worker_that_is_away_keeps_nothing() -> None:
    kept = KeptImages()
    for row in (0, 3):
        kept.note_sent(row, [(b"a", 1)], 100)
    kept.forget(3)
    kept.forget(5)
    assert kept.rows_of(b"a") == 0b0001


def test_a_worker_that_lacks_images_again_and_again_is_believed_to_keep_none() -> None:
    kept = KeptImages()
    kept.note_missed(0)  # it is no such worker
    for _ in range(MAX_MISSES - 1):
        kept.note_sent(0, [(b"a", 1)], 100)
        kept.note_missed(0)
        assert not kept.rows_of(b"a")
    kept.note_sent(0, [(b"a", 1)], 100)
    kept.note_sent(0, [(b"a", 0)], 100)  # this one was there
    for _ in range(MAX_MISSES):
        kept.note_sent(0, [(b"a", 1)], 100)
        assert kept.rows_of(b"a")
        kept.note_missed(0)
    kept.note_sent(0, [(b"a", 1)], 100)
    assert not kept.rows_of(b"a")
