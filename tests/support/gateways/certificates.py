"""Certificates for workers and gateways, made by the commands of docs/operations.md."""

import subprocess
from pathlib import Path

import pytest

from saccade.transport.access import Access
from saccade.transport.credentials import WorkerCredentials, read_authorities, read_identity, read_token

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


class Files:
    """What the commands leave in *folder*."""

    def __init__(self, folder: Path) -> None:
        commands = [
            line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    ") and "openssl" in line
        ]
        for command in commands:
            subprocess.run(["bash", "-c", command], cwd=folder, check=True, capture_output=True)
        self.folder = folder
        self.token = read_token(folder / "worker.token")
        self.authorities = read_authorities(folder / "ca.pem", "--tls-client-ca")
        self.worker = read_identity(folder / "worker.pem", folder / "worker.key")
        self.gateway = read_identity(folder / "gateway.pem", folder / "gateway.key")

    def access(self, *, token: bool = False, tls: bool = False, mutual: bool = False) -> Access:
        """What a worker asks for."""
        return Access(
            token=self.token if token else None,
            identity=self.worker if tls or mutual else None,
            client_authorities=self.authorities if mutual else None,
        )

    def credentials(self, *, token: bool = False, tls: bool = False, mutual: bool = False) -> WorkerCredentials:
        """What a gateway shows."""
        return WorkerCredentials(
            token=self.token if token else None,
            authorities=self.authorities if tls or mutual else None,
            identity=self.gateway if mutual else None,
        )


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))
