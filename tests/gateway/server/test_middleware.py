"""Whose account a request has, and what an error holds when it is answered."""

import asyncio
from pathlib import Path

import pytest
from tables import table

from saccade.errors import InternalError, InvalidApiKey
from saccade.gateway.server.access_keys import METRICS_PATH, Keys
from saccade.gateway.server.errors import drop_tracebacks
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.gateway.tenants.key_table import digest_of


@table(
    ("key", "is_open", "is_operator"),
    [
        ("flag", False, True),
        ("flag", True, True),
        ("acme", False, None),
        ("acme", True, False),
        ("unknown", False, None),
        ("unknown", True, False),
        ("", False, None),
        ("", True, False),
    ],
)
def test_only_an_operator_sees_tenants_on_the_metrics(
    key: str, is_open: bool, is_operator: bool | None, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.acme]\n[[keys]]\ntenant = "acme"\nsha256 = "{digest_of(b"acme").hex()}"\n')
    subject = Keys(ApiKeyStore(("flag",), file), {METRICS_PATH} if is_open else ())
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    if is_operator is None:
        with pytest.raises(InvalidApiKey):
            subject.account(METRICS_PATH, headers)
    else:
        assert bool(subject.account(METRICS_PATH, headers).tenant.id) is is_operator


async def test_an_error_that_another_request_is_handling_ends_only_here() -> None:
    """Requests that wait for the same work get the same error."""
    error = InternalError("The work failed.")
    may_end = asyncio.Event()

    async def fail() -> None:
        try:
            raise error
        finally:
            await may_end.wait()

    other = asyncio.create_task(fail())
    await asyncio.sleep(0)
    drop_tracebacks(error)
    may_end.set()
    with pytest.raises(InternalError, match="The work failed"):
        await asyncio.wait_for(other, 10)
