"""Which account a key opens, while the file of the keys changes."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from saccade.errors import InvalidApiKey, StartupError
from saccade.gateway.tenants import api_keys
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.gateway.tenants.report import TenantMetrics


def text(*keys: str, tenant: str = "acme", limits: str = "") -> str:
    """A file in which *keys* are those of *tenant*."""
    entries = [f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{hashlib.sha256(k.encode()).hexdigest()}"\n' for k in keys]
    return f"[tenants.{tenant}]\n{limits}\n" + "".join(entries)


def write(path: Path, content: str | None) -> None:
    """Replace *path* in one step; None removes it."""
    if content is None:
        path.unlink()
        return
    other = path.with_suffix(".new")
    other.write_text(content)
    os.replace(other, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, text("one", limits="requests_per_minute = 5"))
    return path


def test_without_keys_everybody_has_one_account() -> None:
    store = ApiKeyStore()
    assert store.is_open
    assert store.account(b"") is store.account(b"anything") is store.everybody
    assert store.everybody.tenant.id == b""


def test_keys_of_flags_and_of_the_file_stand_side_by_side(path: Path) -> None:
    store = ApiKeyStore(("flag",), path)
    assert not store.is_open
    assert store.account(b"one").tenant.name == "acme"
    assert store.account(b"flag").tenant == ApiKeyStore(("flag",)).account(b"flag").tenant
    for wrong in (b"", b"onee", b"ONE", hashlib.sha256(b"one").hexdigest().encode()):
        with pytest.raises(InvalidApiKey):
            store.account(wrong)


def test_a_program_does_not_start_with_a_file_that_is_wrong(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--api-keys-file .*nothing: No such file"):
        ApiKeyStore((), tmp_path / "nothing")
    with pytest.raises(StartupError, match=r"keys\.toml: .*also given by --api-key"):
        ApiKeyStore(("one",), path)
    with pytest.raises(StartupError, match="also given by --admin-key"):
        ApiKeyStore((), path, ("one",))


async def test_the_file_is_read_again_when_it_changes(path: Path) -> None:
    store = ApiKeyStore((), path)
    account = store.account(b"one")
    with account.request():
        pass
    write(path, text("two", "three", limits="requests_per_minute = 50"))
    await store.look()
    assert store.account(b"two") is store.account(b"three") is account
    assert (account.usage.requests, account.tenant.limits.requests) == (1, 50)
    with pytest.raises(InvalidApiKey):
        store.account(b"one")
    write(path, text("two", tenant="other"))
    await store.look()
    assert set(store.named) == {"other"}
    assert store.account(b"two") is not account


async def test_faulty_file_changes_nothing_and_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, registry = ApiKeyStore((), path), CollectorRegistry()
    registry.register(TenantMetrics(store))

    async def is_current(content: str | None) -> float | None:
        write(path, content)
        for _ in range(2):
            await store.look()
        assert store.account(b"one").tenant.name == "acme"
        return registry.get_sample_value("saccade_api_keys_file_current")

    assert await is_current(text("one")) == 1
    assert await is_current(text("one") + "[[keys]]\ntenant = 3") == 0
    assert await is_current(None) == 0
    assert await is_current("") == 0
    assert await is_current(text("one")) == 1
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [("number 2" in error, "No such file" in error, "no [[keys]]" in error) for error in errors] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


def test_no_content_of_the_file_ends_the_watching(path: Path) -> None:
    store, registry = ApiKeyStore((), path), CollectorRegistry()
    registry.register(TenantMetrics(store))
    contents = {
        "nested lists": b"x = " + b"[" * 5000,
        "nested tables": b"x = " + b"{a=" * 5000,
        "many digits": b"x = " + b"9" * 5000,
        "binary": bytes(range(256)),
        "date that is none": b"x = 2026-13-45",
        "half a text": text("one").encode()[:-10],
    }
    for name, content in contents.items():
        path.write_bytes(content)
        asyncio.run(store.look())
        assert registry.get_sample_value("saccade_api_keys_file_current") == 0, name
        with pytest.raises(StartupError, match=r"keys\.toml: "):
            ApiKeyStore((), path)
    for make in (os.mkfifo, os.mkdir):
        path.unlink()
        make(path)
        asyncio.run(store.look())
        assert registry.get_sample_value("saccade_api_keys_file_current") == 0, make
        path.unlink() if make is os.mkfifo else path.rmdir()
        path.touch()
    write(path, text("two"))
    asyncio.run(store.look())
    assert registry.get_sample_value("saccade_api_keys_file_current") == 1
    assert store.account(b"two").tenant.name == "acme"


async def test_unwatched_file_is_not_current(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, registry = ApiKeyStore((), path), CollectorRegistry()
    registry.register(TenantMetrics(keys))

    def is_current() -> float | None:
        return registry.get_sample_value("saccade_api_keys_file_current")

    def fail(*_: object) -> None:
        raise KeyError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(api_keys, "parse_keys", fail)
        write(path, text("two"))
        with pytest.raises(KeyError):
            await keys.look()
    await keys.look()
    assert is_current() == 0
    write(path, text("three"))
    await keys.look()
    assert is_current() == 1
    watching = asyncio.create_task(keys.follow())
    await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait([watching])
    assert is_current() == 0


def test_metrics_count_by_tenant_of_the_file(path: Path) -> None:
    store, registry = ApiKeyStore(("flag",), path), CollectorRegistry()
    registry.register(TenantMetrics(store))
    account = store.account(b"one")
    with account.request(), store.account(b"flag").request():
        account.use_prompt(7)
        account.use_cached(6)
        account.use_answer(5)
        account.use_images(4)
    names = ("requests", "refused", "prompt_tokens", "cached_tokens", "completion_tokens", "image_bytes")
    values = [registry.get_sample_value(f"saccade_tenant_{name}_total", {"tenant": "acme"}) for name in names]
    assert values == [1, 0, 7, 6, 5, 4]
    others = CollectorRegistry()
    others.register(TenantMetrics(ApiKeyStore(("flag",))))
    assert list(others.collect()) == []
