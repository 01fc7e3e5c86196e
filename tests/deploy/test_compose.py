"""The compose files fit the specification's schema, their flags are Saccade's, and their services fit together."""

import json
import os
import re
import stat
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import jsonschema
import pytest
import yaml
from tables import table

from saccade.cli.main import make_app
from saccade.fleet.address import check_url
from saccade.transport.credentials import TOO_OPEN

pytestmark = pytest.mark.ci

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
COMPOSE, CUDA = (yaml.safe_load((FOLDER / name).read_text()) for name in ("compose.yaml", "compose.cuda.yaml"))
SERVICES = COMPOSE["services"]
OURS = ("worker-0", "worker-1", "gateway")
SCHEMA = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())


def arguments(name: str, config: Path | None = None) -> dict[str, Any]:
    """What our program makes of a service's command; variables have their defaults, secrets are in *config*."""
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in SERVICES[name]["command"]]
    words = ["--admin-key=key" if word.startswith("--config=") and config is None else word for word in words]
    words = [word for word in words if not word.startswith("--config=")]
    _, bound, _ = make_app(config).parse_args(words, exit_on_error=False, print_error=False)
    fields = dict(bound.arguments)
    for group in [value for value in fields.values() if hasattr(value, "__dataclass_fields__")]:
        fields |= vars(group)
    return fields


@pytest.mark.parametrize("content", [COMPOSE, CUDA], ids=["compose", "cuda"])
def test_file_fits_the_schema(content: Any) -> None:
    validator = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)
    validator.validate(content)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**content, "services": {"gateway": {"imagee": "saccade"}}})


def test_the_gateway_and_its_workers_share_sockets_and_pixels() -> None:
    urls = arguments("gateway")["worker_url"]
    for url, name in zip(urls, ("worker-0", "worker-1"), strict=True):
        check_url(url)
        assert url == f"unix:{arguments(name)['access'].uds}"
        assert SERVICES[name]["healthcheck"]["test"][-1] == url
    for name in OURS:
        assert {"sockets:/run/saccade", "pixels:/dev/shm"} <= set(SERVICES[name]["volumes"])
    assert COMPOSE["volumes"]["pixels"]["driver_opts"]["type"] == "tmpfs"


@pytest.mark.parametrize("name", OURS)
def test_service_is_confined_and_has_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    given = arguments(name)
    drain = given["shutdown_timeout"] if "shutdown_timeout" in given else given["server"].shutdown_timeout_seconds
    assert int(service["stop_grace_period"].rstrip("s")) > drain


def test_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("../"):
                assert (FOLDER / source).exists()
    assert (FOLDER / SERVICES["gateway"]["build"]["dockerfile"]).name == "Dockerfile"


def test_each_worker_has_a_gpu_of_its_own() -> None:
    assert CUDA["services"].keys() == set(OURS)
    devices = [
        device
        for name in OURS
        for device in CUDA["services"][name].get("deploy", {"resources": {"reservations": {"devices": []}}})[
            "resources"
        ]["reservations"]["devices"]
    ]
    assert [device["device_ids"] for device in devices] == [["0"], ["1"]]


def test_new_secrets_writes_keys_that_the_services_can_use(tmp_path: Path) -> None:
    script = tmp_path / "new-secrets"
    script.write_bytes((FOLDER / "new-secrets").read_bytes())
    run = ["sh", str(script)]
    said = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    secrets = tmp_path / "secrets"
    assert {entry["file"] for entry in COMPOSE["secrets"].values()} == {
        f"secrets/{path.name}" for path in secrets.iterdir()
    }
    for path in secrets.iterdir():
        assert not stat.S_IMODE(path.stat().st_mode) & TOO_OPEN
    assert (tmp_path / ".env").read_text() == f"SECRETS_GID={os.getgid()}\n"
    settings = tomllib.loads((secrets / "gateway.toml").read_text())
    key, metrics_key = settings["api-key"]
    assert key in said
    assert (secrets / "metrics.key").read_text() == metrics_key
    server = arguments("gateway", secrets / "gateway.toml")["server"]
    assert server.api_keys == (key, metrics_key)
    assert server.admin_keys == tuple(settings["admin-key"])
    again = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert (again.returncode, again.stdout) == (1, "")
    assert (
        again.stderr
        == f"The keys are in {secrets} already; nothing was changed. For new ones, move that folder away.\n"
    )
    assert tomllib.loads((secrets / "gateway.toml").read_text()) == settings


@table(
    ("before", "kept"),
    [
        (None, ""),
        ("", ""),
        ("SECRETS_GID=1\n", ""),
        ("MODEL=/models/a", "MODEL=/models/a\n"),
        ("# mine\n export SECRETS_GID = 1\n\nMODEL=%s\\n\nSECRETS_GID=2\n", "# mine\n\nMODEL=%s\\n\n"),
    ],
)
def test_new_secrets_writes_its_line_of_env_once(before: str | None, kept: str, tmp_path: Path) -> None:
    script, settings = tmp_path / "new-secrets", tmp_path / ".env"
    script.write_bytes((FOLDER / "new-secrets").read_bytes())
    if before is not None:
        settings.write_text(before)
    for folder in ("first", "second"):  # moved away, as the script says
        subprocess.run(["sh", str(script)], capture_output=True, check=True, timeout=60)
        (tmp_path / "secrets").rename(tmp_path / f"{folder}-{uuid4()}")
        assert settings.read_text() == f"{kept}SECRETS_GID={os.getgid()}\n"


def test_prometheus_scrapes_the_gateway_with_its_key() -> None:
    prometheus = yaml.safe_load((FOLDER / "../prometheus/prometheus.yaml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] == "saccade"
    assert job["static_configs"] == [{"targets": [f"gateway:{arguments('gateway')['server'].port}"]}]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{SERVICES['prometheus']['secrets'][0]}"
    mounted = [volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]]
    assert set(prometheus["rule_files"]) <= set(mounted)
    (source,) = yaml.safe_load((FOLDER / "../grafana/provisioning/datasources/saccade.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
