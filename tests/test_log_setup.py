"""Log lines are JSON where no person reads them."""

import contextlib
import json
import os
import subprocess
import sys

PROGRAM = """
import logging, structlog
from saccade.log_setup import configure_logging
configure_logging()
with structlog.contextvars.bound_contextvars(request_id="r1"):
    structlog.get_logger("saccade.a").info("hello", number=3)
    logging.getLogger("saccade.b").warning("worker %s left", "w")
    logging.getLogger("uvicorn.error").warning("Unsupported upgrade request.")
    try:
        local = "a local variable"
        1 / 0
    except ZeroDivisionError:
        structlog.get_logger("saccade.c").exception("failed")
"""


def test_log_lines_of_both_kinds_are_json_with_the_request_id() -> None:
    output = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in output.stderr.splitlines()]
    assert output.stdout == ""
    assert [line["event"] for line in lines] == ["hello", "worker w left", "failed"]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert all(line["request_id"] == "r1" and line["timestamp"].endswith("Z") for line in lines)
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert "a local variable" not in output.stderr


ABOUT_WORKERS = """
import logging, structlog
from saccade.log_setup import configure_logging
configure_logging()
logger = logging.getLogger("saccade.a")
logger.warning("request %s: 100%% of worker %s failed after %.1f s: %s", "r1", "grpc://a:1", 0.5, "it left")
logger.warning("worker %s is ready", "unix:/b")
logger.warning("worker %s is not meant")
structlog.get_logger("saccade.b").warning("left", worker="grpc://c:1")
"""


def test_lines_about_a_worker_have_its_url_and_one_form() -> None:
    output = subprocess.run([sys.executable, "-c", ABOUT_WORKERS], capture_output=True, check=True).stderr.splitlines()
    lines = [json.loads(line) for line in output]
    assert [line.get("worker") for line in lines] == ["grpc://a:1", "unix:/b", None, "grpc://c:1"]
    assert lines[0]["event"] == "request r1: 100% of worker grpc://a:1 failed after 0.5 s: it left"
    for line, decoded in zip(output, lines, strict=True):
        assert list(decoded)[:3] == ["event", "timestamp", "level"]
        assert line == json.dumps(decoded, separators=(",", ":")).encode()


QUOTING = """
import logging, structlog
from saccade.log_setup import configure_logging
configure_logging()
logging.getLogger("saccade.a").warning("no connection to worker: %s", "\\x1b[2Jgo\\x07ne")
structlog.get_logger("saccade.b").warning("left", worker="\\x1b]0;title\\x9c")
"""


def test_a_terminal_gets_nothing_to_interpret_that_a_worker_sent() -> None:
    ours, theirs = os.openpty()
    # Colours are the renderer's own.
    subprocess.run([sys.executable, "-c", QUOTING], stderr=theirs, env={**os.environ, "NO_COLOR": "1"}, check=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what Linux says at the end
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert b" [2Jgo ne" in shown
    assert b"\x1b[2J" not in shown
    assert b"\x1b]0;" not in shown
    assert b"\x9c" not in shown
    assert b"\x07" not in shown


FAILING = """
from saccade.log_setup import configure_logging, log_uncaught
configure_logging()
log_uncaught()
1 / 0
"""


def test_error_that_ends_a_process_is_logged() -> None:
    output = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True)
    assert output.returncode == 1
    [line] = map(json.loads, output.stderr.splitlines())
    assert line["event"] == "the process has failed"
    assert "ZeroDivisionError" in line["exception"]


def test_a_process_that_fails_ends_though_nobody_reads_its_log() -> None:  # [eng] 38
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    assert subprocess.run([sys.executable, "-c", FAILING], stderr=writer, timeout=60).returncode == 1
    os.close(reader)
    os.close(writer)
