"""A worker's description as its gateway reads it."""

import gc
import weakref

import msgspec
from fronts import DESCRIPTION

from saccade.connectors.native.descriptions import KnownFiles, description_of
from saccade.protocol.description import ModelFiles


def payload(model: str, **files: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(DESCRIPTION, model=model, files=ModelFiles(files=files)))


def test_equal_files_of_several_workers_are_kept_once() -> None:
    known = KnownFiles()
    one, same = (description_of(payload(name, config=b"{}"), known) for name in ("a", "b"))
    other = description_of(payload("a", config=b"{ }"), known)
    assert (one.model, same.model) == ("a", "b")
    assert one.files is same.files
    assert other.files.files == {"config": b"{ }"}


def test_files_of_a_worker_that_is_gone_are_not_kept() -> None:
    known = KnownFiles()
    gone = weakref.ref(description_of(payload("a", config=b"1"), known).files)
    gc.collect()
    assert gone() is None
