"""`saccade fleet watch`: the file follows the directory, whatever the directory says, or does not."""

import signal
import threading
from pathlib import Path

import pytest
from tables import table

from saccade.cli import fleet
from saccade.supervisor.ray_directory import Listing

A, B, C = "grpc://10.0.0.1:9000", "grpc://10.0.0.2:9000", "grpc://[fd00::1]:9000"

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # Ray's own


def listing(*urls: str, complete: bool = True) -> Listing:
    return Listing({"both": urls}, complete)


@table(
    ("listings", "files"),
    [
        ([listing(A), listing(A, B), listing(B)], [[A], [A, B], [B]]),
        ([listing(A, B), None, listing(B)], [[A, B], [A, B], [B]]),
        ([listing(A), Listing({}, complete=True)], [[A], ["# no worker"]]),
        ([listing(A, B), listing(complete=False), listing(C, complete=False), listing(C)],
         [[A, B], [A, B], [A, B, C], [C]]),
        ([Listing({}, complete=False), listing(A, complete=False)], [None, [A]]),
        ([Listing({}, complete=True)], [["# no worker"]]),
        ([Listing({"prefill": (B,), "decode": (A,)}, complete=True)], [[A, B]]),
    ],
)  # fmt: skip
def test_the_file_follows_the_directory(
    listings: list[Listing | None], files: list[list[str] | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # F11
    path, seen, left = tmp_path / "workers", [], iter(listings)

    def wait(_: threading.Event, __: float) -> bool:
        seen.append(path.read_text().splitlines() if path.exists() else None)
        return len(seen) == len(listings)

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(threading.Event, "wait", wait)
    fleet.keep_file(lambda: next(left), path)
    assert seen == files


@table(
    ("listed", "kept"),
    [
        ([A, C], (A, C)),
        ([A, f"{A}\nunix:/run/docker.sock"], (A,)),
        ([f"{A} # {C}", f"{A}\u2028{C}", f"{A}\x1b[2J"], ()),
        (["unix:/run/docker.sock", "vllm://10.0.0.1:80", "", "grpc://no port", "grpc://a:1/b"], ()),
        ([7, None, A.encode(), [A]], ()),
    ],
)
def test_only_addresses_of_workers_are_listed(listed: list[object], kept: tuple[str, ...]) -> None:
    ray_cluster = pytest.importorskip("saccade.supervisor.ray_cluster", reason="needs Ray: pip install 'ray[serve]'")
    assert ray_cluster.addresses(listed) == kept
