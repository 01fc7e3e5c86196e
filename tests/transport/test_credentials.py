"""Token, certificates and keys as they are read from files."""

from pathlib import Path

import pytest
from certificates import Files, files

from saccade.errors import StartupError
from saccade.transport.credentials import read_authorities, read_identity, read_token

__all__ = ["files"]


def written(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_token_is_one_word_of_the_file(tmp_path: Path, mode: int) -> None:
    assert read_token(written(tmp_path, b"  0123456789abcdef\n", mode)) == "0123456789abcdef"


@pytest.mark.parametrize(
    "content", [b"", b"0123456789abcde", b"0123456789 abcdef", b"0123456789abcdef\xff", b"0123456789\nabcdef"]
)
def test_token_that_is_weak_or_cannot_be_sent_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StartupError, match=r"openssl rand"):
        read_token(written(tmp_path, content))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666])
def test_secret_that_others_may_read_or_change_is_refused(files: Files, tmp_path: Path, mode: int) -> None:
    with pytest.raises(StartupError, match="chmod 600"):
        read_token(written(tmp_path, b"0123456789abcdef", mode))
    with pytest.raises(StartupError, match="chmod 600"):
        read_identity(files.folder / "worker.pem", written(tmp_path, (files.folder / "worker.key").read_bytes(), mode))


def test_file_that_is_missing_is_named(tmp_path: Path) -> None:
    for read in (
        lambda: read_token(tmp_path / "nothing"),
        lambda: read_identity(tmp_path / "nothing", tmp_path / "nothing"),
        lambda: read_authorities(tmp_path / "nothing", "--tls-client-ca"),
    ):
        with pytest.raises(StartupError, match=r"nothing cannot be read \(--"):
            read()


def test_certificate_and_key_that_do_not_fit_are_refused(files: Files, tmp_path: Path) -> None:
    certificate, key = files.folder / "worker.pem", files.folder / "worker.key"
    with pytest.raises(StartupError, match="belong together"):
        read_identity(certificate, None)
    with pytest.raises(StartupError, match="belong together"):
        read_identity(None, key, "--worker-tls")
    for other in (files.folder / "gateway.key", written(tmp_path, b"no key")):
        with pytest.raises(StartupError, match="not a certificate and its key"):
            read_identity(certificate, other)
    with pytest.raises(StartupError, match="--tls-client-ca"):
        read_authorities(tmp_path / "secret", "--tls-client-ca")
