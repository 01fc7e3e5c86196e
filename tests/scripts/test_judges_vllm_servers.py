"""The stand-ins of vLLM's server: its tests speak to another, take drawn pictures, and can import anything."""

import contextlib
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from judges.outcomes import FAILED, PASSED
from judges.pytest_suite import Suite, run_suite

pytestmark = pytest.mark.ci

STAND_INS = Path(__file__).parents[2] / "scripts" / "judges" / "stand_ins"
TESTS = """
import urllib.request
import pytest
from tests.utils import ROCM_EXTRA_ARGS, RemoteOpenAIServer, multi_gpu_only, requires_fp8
from vllm.multimodal.utils import encode_image_url, fetch_image
from vllm.platforms import current_platform
from vllm.some.module import Anything

ARGS = [*ROCM_EXTRA_ARGS, "--device" if current_platform.is_cuda() else "--enforce-eager"]


@pytest.fixture(scope="module")
def server():
    with RemoteOpenAIServer("a/model", ARGS, env_dict={"A": "B"}) as remote_server:
        yield remote_server


def test_client(server):
    assert [model.id for model in server.get_client().models.list()] == ["a model"]


def test_address(server):
    assert urllib.request.urlopen(server.url_for("v1", "models")).status == 200


@pytest.mark.parametrize("image_url", ["RGBA_comp.png"], indirect=True)
def test_picture(image_url, local_asset_server):
    picture = local_asset_server.get_image_asset("RGBA_comp.png")
    assert fetch_image(image_url).tobytes() == picture.tobytes() and picture.mode == "RGBA"
    assert encode_image_url(picture).startswith("data:image/png;base64,")


@pytest.mark.parametrize("image_urls", [["one.png", "two.png"]], indirect=True)
def test_pictures(image_urls):
    assert fetch_image(image_urls[0]).tobytes() != fetch_image(image_urls[1]).tobytes()


@multi_gpu_only(num_gpus=2)
@requires_fp8
def test_gpus():
    pass


def test_what_is_not_here_fails():
    Anything()
"""


class Models(BaseHTTPRequestHandler):
    """Answers everything with a list of one model."""

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "a model", "object": "model", "created": 0, "owned_by": "us"}]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


@contextlib.contextmanager
def serving_models() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_tests_of_servers_speak_to_ours(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS)
    # As in vLLM's archive.
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/__init__.py").touch()
    with serving_models() as address:
        told = {"JUDGE_SERVER": address, "JUDGE_CHECKPOINT": str(tmp_path)}
        paths = (STAND_INS / "vllm_servers", STAND_INS / "vllm", tmp_path)
        options = ("-p", "vllm_server_stand_ins")
        found = run_suite(Suite(Path(sys.executable), tmp_path, ("test_a.py",), options, told, paths), ())
    assert {one.name.removeprefix("test_a.py::"): one.became for one in found} == {
        "test_client": PASSED,
        "test_address": PASSED,
        "test_picture[RGBA_comp.png]": PASSED,
        "test_pictures[image_urls0]": PASSED,
        "test_gpus": "skipped",
        "test_what_is_not_here_fails": FAILED,
    }, found
