"""The log: one line an event, that no client can forge and none can flood."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest

from tenure.server.log import LOGGER, LogFormat, LogLevel, log_event, log_uncaught, set_up


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tenure")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before


@contextlib.contextmanager
def logging_to(stream: io.StringIO, form: LogFormat, level: LogLevel = "info") -> Iterator[None]:
    """Log to a file, whose content is the stream's at the end of the block."""
    with tempfile.TemporaryFile() as file:
        handler = set_up(form, level, file.fileno())
        try:
            yield
        finally:
            handler.close()
        file.seek(0)
        stream.write(file.read().decode())


def written(form: LogFormat, *, level: int = logging.INFO, **facts: object) -> str:
    stream = io.StringIO()
    with logging_to(stream, form):
        log_event(LOGGER, level, "something happened", **facts)
    return stream.getvalue()


def test_a_line_has_time_level_event_and_facts() -> None:
    line = written("text", address="tenure://127.0.0.1:7070", sessions=3, nothing=None)
    moment, level, rest = line.split(maxsplit=2)
    assert time.strptime(moment[:19], "%Y-%m-%dT%H:%M:%S")
    assert moment.endswith("Z")
    assert level == "info"
    assert rest == "something happened  address=tenure://127.0.0.1:7070  sessions=3\n"


def test_a_line_of_json_is_an_object() -> None:
    told = json.loads(written("json", level=logging.WARNING, sessions=3, why=OSError("no")))
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "warning",
        "event": "something happened",
        "sessions": 3,
        "why": "no",
    }


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("plain", "plain"),
        ("two words", '"two words"'),
        ("", '""'),
        ('x  level="error"', r'"x  level=\"error\""'),
        ("a\n2026-01-01T00:00:00.000Z info forged", r'"a\n2026-01-01T00:00:00.000Z info forged"'),
        ("\x1b[31mred", r'"\u001b[31mred"'),
        ("\u2028", r'"\u2028"'),
        ("größe", "größe"),
    ],
)
def test_what_clients_send_cannot_forge_a_line(sent: str, shown: str) -> None:
    assert written("text", sent=sent).rstrip("\n").endswith(f"  sent={shown}")
    assert json.loads(written("json", sent=sent))["sent"] == sent


def test_what_is_below_the_level_is_not_said() -> None:
    assert written("text", level=logging.DEBUG) == ""


def test_other_libraries_are_heard_when_something_is_wrong() -> None:
    stream = io.StringIO()
    with logging_to(stream, "json", "debug"):
        logging.getLogger("asyncio").info("nothing of interest")
        logging.getLogger("asyncio").warning("%d tasks", 3)
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["event"], told["logger"]) == ("3 tasks", "asyncio")


def test_an_exception_comes_with_its_traceback() -> None:
    stream = io.StringIO()
    with logging_to(stream, "json"):
        try:
            raise OSError("the disk")
        except OSError:
            LOGGER.exception("it failed")
    assert "OSError: the disk" in json.loads(stream.getvalue())["traceback"]


@contextlib.contextmanager
def at(second: int) -> Iterator[None]:
    """As if it were that second, for `logging` of any Python version."""
    with (
        mock.patch("time.time", return_value=float(second)),
        mock.patch("time.time_ns", return_value=second * 10**9),
    ):
        yield


def test_what_clients_can_cause_without_end_is_said_a_few_times_then_counted() -> None:
    stream = io.StringIO()
    with logging_to(stream, "json"):
        with at(1000):
            for _ in range(1000):
                log_event(LOGGER, logging.WARNING, "refused")
            log_event(LOGGER, logging.WARNING, "something else")
        with at(1011):
            log_event(LOGGER, logging.WARNING, "refused")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == [
        *["refused"] * 20,
        "something else",
        "refused",
    ]
    assert lines[-1]["unsaid"] == 980


def test_what_cannot_be_formatted_is_a_line_too() -> None:
    stream = io.StringIO()
    with logging_to(stream, "json"):
        LOGGER.warning("%d tasks", "three")
    told = json.loads(stream.getvalue())
    assert told["event"] == "a log line cannot be written"
    assert "TypeError" in told["why"]


class _Broken:
    def __del__(self) -> None:
        raise OSError("while it was collected")


def test_what_python_would_write_to_stderr_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    stream = io.StringIO()

    def fail() -> None:
        raise OSError("in a thread")

    with logging_to(stream, "json"), warnings.catch_warnings():
        warnings.simplefilter("always")
        log_uncaught()
        try:
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            _Broken()
            warnings.warn("a warning", RuntimeWarning, stacklevel=1)
        finally:
            logging.captureWarnings(False)
    told = stream.getvalue()
    for each in ("in a thread", "while it was collected", "a warning"):
        assert each in told
    assert capsys.readouterr().err == ""
