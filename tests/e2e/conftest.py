"""One server on the tiny checkpoint for all end-to-end tests, the reference beside it, and what tests of fleets share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import Reference
from server import Server, free_port, serving

from benchmarks.fleet.load import chats, photos
from benchmarks.fleet.plan import Plan
from benchmarks.fleet.running import workers


@pytest.fixture(scope="session")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys file of tiny_server, with one tenant whose key nobody knows."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(f'[tenants.first]\n[[keys]]\ntenant = "first"\nsha256 = "{"0" * 64}"\n')
    return file


@pytest.fixture(scope="session")
def admin_port() -> int:
    """The port of tiny_server's operator, whose key is `operator`."""
    return free_port()


@pytest.fixture(scope="session")
def tiny_server(
    tiny_qwen3_vl: Path, keys_file: Path, admin_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`saccade serve` on the tiny random checkpoint, named `tiny`, with two keys, a log, and media from this machine."""
    flags = ("--served-model-name", "tiny", "--max-model-len", "4096", "--api-key", "one", "--api-key", "two")
    flags += ("--allowed-media-networks", "127.0.0.0/8", "--log-level", "INFO", "--api-keys-file", str(keys_file))
    flags += ("--admin-port", str(admin_port), "--admin-key", "operator")
    with serving(str(tiny_qwen3_vl), *flags, key="one", log=tmp_path_factory.mktemp("tiny") / "stderr") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_reference(tiny_qwen3_vl: Path) -> Reference:
    """transformers on the same checkpoint."""
    return Reference(tiny_qwen3_vl)


@pytest.fixture(scope="session")
def fleet_plan() -> Plan:
    """What a small fleet is asked."""
    return Plan(num_images=10, num_asks=3, num_clients=4, size=(128, 96))


@pytest.fixture(scope="module")
def fleet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a fleet's logs and images go."""
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def fleet_workers(tiny_qwen3_vl: Path, fleet_folder: Path) -> Iterator[list[str]]:
    """Two workers of one model, by their URLs."""
    with workers(tiny_qwen3_vl, 2, fleet_folder, ("--max-model-len", "1024")) as urls:
        yield urls


@pytest.fixture(scope="module")
def fleet_chats(fleet_folder: Path, fleet_plan: Plan) -> list[dict[str, Any]]:
    """A chat about each image of the plan, and one about an image that the plan does not ask about."""
    return chats(photos(fleet_folder, fleet_plan))
