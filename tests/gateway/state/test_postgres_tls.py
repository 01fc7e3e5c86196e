"""PostgreSQL over TLS: the server's certificate is verified, and what crosses a network in the clear is said."""

import datetime
import ipaddress
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import postgres
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from server import free_port
from tables import table

from saccade.errors import StartupError
from saccade.gateway.state.postgres import PostgresServer
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State

DAY = datetime.timedelta(1)


def certify(folder: Path, name: str) -> None:
    """Write a certificate for 127.0.0.1 that signs itself: NAME.pem and NAME.key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates of two servers."""
    made = tmp_path_factory.mktemp("certificates")
    for name in ("server", "other"):
        certify(made, name)
    return made


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Of a server that takes connections over TLS alone."""
    if not postgres.IS_INSTALLED:
        pytest.skip("needs PostgreSQL's programs, as in Debian's package postgresql")
    port = free_port()
    with postgres.running(tls=postgres.Tls(port, folder / "server.pem", folder / "server.key")):
        yield port


def url(port: int, root: Path, host: str = "127.0.0.1", mode: str = "verify-full") -> str:
    return f"postgresql://{postgres.USER}@{host}:{port}/postgres?sslmode={mode}&sslrootcert={quote(str(root))}"


async def is_encrypted(location: str, key_file: Path) -> bool:
    """Whether the database is reached over TLS. Raises StartupError if it is not reached."""
    state = State.of_settings(StateSettings(location, key_file), tenant_files=1)
    assert state is not None
    try:
        await state.start()
        statement = "select ssl from pg_stat_ssl where pid = pg_backend_pid()"
        [(found,)] = await state.items.database.read(lambda connection: connection.rows(tuple[bool], statement))
        return found
    finally:
        await state.close()


async def test_a_verified_server_is_used_over_tls(port: int, folder: Path, tmp_path: Path) -> None:
    assert await is_encrypted(url(port, folder / "server.pem"), tmp_path / "key")


async def test_a_server_with_another_certificate_is_refused(port: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="certificate verify failed"):
        await is_encrypted(url(port, folder / "other.pem"), tmp_path / "key")


async def test_a_server_with_another_name_is_refused(port: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not match host name"):
        await is_encrypted(url(port, folder / "server.pem", host="localhost"), tmp_path / "key")


async def test_a_server_without_tls_is_refused(port: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be opened"):
        await is_encrypted(url(port, folder / "server.pem", mode="disable"), tmp_path / "key")


@table(
    ("host", "mode", "warned"),
    [
        ("db.internal", "", False),
        ("db.internal", "verify-full", False),
        ("db.internal", "verify-ca", False),
        ("db.internal", "require", True),
        ("10.0.0.1", "disable", True),
        ("127.0.0.1,db.internal", "disable", True),
        ("127.0.0.1", "disable", False),
        ("[::1]", "disable", False),
        ("localhost", "", False),
        ("", "disable", False),
        ("%2Frun%2Fpostgresql", "disable", False),
    ],
)
def test_what_crosses_a_network_in_the_clear_is_said(
    host: str, mode: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    PostgresServer(f"postgresql://{host}/database" + (f"?sslmode={mode}" if mode else ""))
    records = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(records) == warned
    assert all(f"sslmode={mode}" in record.getMessage() for record in records)


async def test_another_host_needs_a_certificate_by_default(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where libpq looks for the authority
    # Only libpq reads this as 127.0.0.1, so it counts as another host.
    location = f"postgresql://{postgres.USER}@127.1:{port}/postgres"
    with pytest.raises(StartupError, match="root certificate file"):
        await is_encrypted(location, tmp_path / "key")
