"""Tracebacks name places and kinds of errors, and repeat nothing that an error says of its input."""

import subprocess
import sys

from saccade.errors import InvalidValue, WorkerFailed
from saccade.tracebacks import traceback_of

TEXT = "zqsecretqz"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """*error*, raised here because of *cause*."""
    try:
        try:
            if cause is not None:
                raise cause
        except Exception as first:
            raise error from first
        raise error
    except Exception as caught:
        return caught


def test_a_traceback_has_places_and_kinds_only() -> None:
    text = traceback_of(raised(KeyError(TEXT), raised(ValueError(TEXT))))
    assert TEXT not in text
    assert text.index("ValueError") < text.index("This led to") < text.index("KeyError")
    assert text.count("in raised\n    raise error") >= 2


def test_errors_whose_words_are_known_say_them() -> None:
    assert traceback_of(FileNotFoundError(2, "No such file", TEXT)).endswith("FileNotFoundError: No such file")
    assert traceback_of(WorkerFailed("It has gone.")).endswith("WorkerFailed: It has gone.")
    assert traceback_of(InvalidValue(TEXT)).endswith("InvalidValue")


def test_an_error_that_leads_to_itself_has_an_end() -> None:
    one, other = ValueError(TEXT), KeyError(TEXT)
    one.__context__, other.__context__ = other, one
    assert traceback_of(one).count("Error") == 2


PROGRAM = f"""
import logging, sys, structlog
from saccade.log_setup import configure_logging
from saccade.tracebacks import hide_messages
configure_logging(serves_clients=True)
for logger in (logging.getLogger("asyncio"), structlog.get_logger("saccade.a")):
    try:
        int("{TEXT}"[0:])
    except ValueError:
        logger.exception("failed")
hide_messages()
sys.stdin.read("{TEXT}"[0:])
"""


def test_a_process_that_serves_clients_logs_no_message_of_an_error() -> None:
    ended = subprocess.run([sys.executable, "-"], input=PROGRAM, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert TEXT not in ended.stderr
    assert ended.stderr.count('"event":"failed"') == 2
    assert ended.stderr.count("ValueError") == 2
    assert "\nTypeError\n" in ended.stderr
