"""Kernels' code in the user's cache folder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from numba import carray

from saccade.nn.kernels import machine_code
from saccade.nn.kernels.machine_code import Body
from saccade.nn.kernels.team import kernel, pointer


@kernel()
def adding(number: int) -> Body:
    """Add *number* to a place."""

    def add(data):  # type: ignore[no-untyped-def]
        carray(pointer(carray(data, 1, np.int64)[0]), 1, np.int64)[0] += number

    return add


@kernel()
def asking() -> Body:
    """Ask for memory."""

    def ask(data):  # type: ignore[no-untyped-def]
        carray(data, 1, np.int64)[0] = np.empty(carray(data, 1, np.int64)[0], np.uint8).ctypes.data

    return ask


@kernel()
def refusing() -> Body:
    """Raise where the argument is not 0."""

    def refuse(data):  # type: ignore[no-untyped-def]
        if carray(data, 1, np.int64)[0]:
            raise ValueError

    return refuse


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder that is empty yet; kernels are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "saccade" / "kernels"
    forget()


def forget() -> None:
    """Be as a process that has no kernel yet."""
    adding.cache_clear()
    machine_code._folder.cache_clear()
    machine_code._surroundings.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled."""
    names: list[str] = []
    compile_body = machine_code._compile

    def counted(body: Any, exact: bool) -> bytes:
        names.append(body.__name__)
        return compile_body(body, exact)

    monkeypatch.setattr(machine_code, "_compile", counted)
    return names


def added(number: int) -> int:
    """Have the kernel add *number* to 30."""
    place = np.array([30])
    adding(number)((place.ctypes.data,))
    return int(place[0])


def test_compiled_once_for_all_processes(cache: Path, compiled: list[str]) -> None:
    assert added(7) == 37
    forget()
    assert added(7) == 37
    assert compiled == ["add"]
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


def test_every_choice_of_parameters_has_code_of_its_own(cache: Path, compiled: list[str]) -> None:
    assert [added(7), added(8), added(7)] == [37, 38, 37]
    assert len(compiled) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("what", ["sources", "numba", "processor"])
def test_compiled_anew_where_something_else_would_come_out(
    cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    added(7)
    forget()
    if what == "sources":
        changed = Path(__file__).read_bytes() + b" "
        monkeypatch.setattr(machine_code.Path, "read_bytes", lambda path: changed)
    elif what == "numba":
        monkeypatch.setattr(machine_code.numba, "__version__", "0")
    else:
        monkeypatch.setattr(machine_code.binding, "get_host_cpu_name", lambda: "x86-64")
    assert added(7) == 37
    assert len(compiled) == 2


@pytest.mark.parametrize("damage", ["short", "empty", "changed", "others may write", "link", "folder"])
def test_what_is_not_as_we_wrote_it_is_made_again(cache: Path, compiled: list[str], damage: str) -> None:
    added(7)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    if damage == "short":
        file.write_bytes(content[:-1])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "changed":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "others may write":
        file.chmod(0o622)
    elif damage == "link":
        os.link(file, cache.parent / "elsewhere")
        file.unlink()
        file.symlink_to(cache.parent / "elsewhere")
    else:
        file.unlink()
        file.mkdir()
    forget()
    assert added(7) == 37
    assert compiled == ["add", "add"]
    if damage != "folder":
        forget()
        assert added(7) == 37
        assert compiled == ["add", "add"]


def test_code_of_another_kernel_is_not_taken_for_it(cache: Path, compiled: list[str]) -> None:
    added(7)
    (seven,) = cache.iterdir()
    added(8)
    (eight,) = set(cache.iterdir()) - {seven}
    eight.write_bytes(seven.read_bytes())
    forget()
    assert added(8) == 38


@pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o770, False), (0o1777, True), (0o700, True)])
def test_a_folder_that_others_may_replace_is_not_used(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, mode: int, is_used: bool
) -> None:
    above = tmp_path / "above"
    (above / "home").mkdir(parents=True)
    above.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(above / "home"))
    assert added(7) == 37
    assert bool(list((above / "home" / "saccade" / "kernels").iterdir())) is is_used


def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, compiled: list[str]) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with structlog.testing.capture_logs() as logs:
        assert added(7) == 37
    assert not list(cache.iterdir())
    assert [line["log_level"] for line in logs] == ["warning"]


def test_a_folder_of_somebody_else_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    cache.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert added(7) == 37
    assert not list(cache.iterdir())


@pytest.mark.parametrize("place", ["file", "nowhere"])
def test_works_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    if place == "file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def nobody() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(machine_code.Path, "home", nobody)
    with structlog.testing.capture_logs() as logs:
        assert added(7) == 37
    assert [line["log_level"] for line in logs] == ["warning"]


def test_a_full_disk_costs_time_alone(cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with structlog.testing.capture_logs() as logs:
        assert added(7) == 37
    assert [line["cause"] for line in logs] == ["No space left on device"]
    assert not list(cache.iterdir())


def test_a_kernel_that_asks_for_memory_is_refused() -> None:
    """Where there is none it would go on with nothing, or end the process."""
    with pytest.raises(TypeError, match="NRT_"):
        asking()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_kernel_that_fails_is_heard(num_threads: int) -> None:
    refusing()((0,), num_threads)
    with pytest.raises(RuntimeError, match="kernel"):
        refusing()((1,), num_threads)
