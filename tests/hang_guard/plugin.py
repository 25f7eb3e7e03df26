"""The plugin of pytest that tells the guard what begins, and what time it has."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

_PROGRAM = str(Path(__file__).with_name("guard.py"))

_TIMES = 2
"""Whatever pytest runs is over within so many times the time that pytest-timeout gives a test.

By then pytest-timeout has failed a test that hangs, and its fixtures have been torn down.
"""

_THREAD_END = 10.0
"""Seconds in which a thread ends that a test leaves behind."""


class ThreadLeftBehind(AssertionError):
    """A test left a thread that would keep its process from ending."""


class HangGuard:
    """The hooks; registered as a plugin when pytest is configured.

    Args:
        config: of this process.
        program: of the guard.
    """

    def __init__(self, config: pytest.Config, program: str = _PROGRAM) -> None:
        self._config = config
        self._stderr = os.dup(2)  # while nothing is captured yet
        hears, self._says = os.pipe()
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", program],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, hears, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, self._stderr, 2),
            ],
            setpgroup=0,  # an interrupt is for pytest
        )
        os.close(hears)
        self._threads: set[threading.Thread] = set()
        self._begin("the collection of tests")

    def _begin(self, name: str, seconds: float | None = None) -> None:
        """Tell the guard; without seconds it is what pytest-timeout gives every test."""
        limit = self._default() if seconds is None else seconds
        with contextlib.suppress(BrokenPipeError):  # a person has ended the guard
            os.write(self._says, f"{limit * _TIMES} {name}\n".encode())

    def _default(self) -> float:
        option = self._config.getoption("timeout")
        return float(self._config.getini("timeout") if option is None else option)

    def _limit(self, item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        if marker is None:
            return self._default()
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        self._begin("between tests", 0)  # a worker may have none, or wait for its workers

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._begin(item.nodeid, self._limit(item))
        self._threads = set(threading.enumerate())
        try:
            return (yield)
        finally:
            self._begin("between tests", 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        yield
        for thread in set(threading.enumerate()) - self._threads:
            if not thread.daemon:
                thread.join(_THREAD_END)
                if thread.is_alive():
                    raise ThreadLeftBehind(f"still running: {thread!r}")

    def pytest_enter_pdb(self) -> None:
        self._begin("the debugger", 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._begin("the end of the session")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        faulthandler.enable(self._stderr)  # pytest has just disabled its own
        if hasattr(self._config, "workerinput"):  # it waits for pytest-xdist, which ends it
            self._begin("after the tests of this worker", 0)
        elif self._config.getoption("collectonly"):  # the process may go on to run them
            self._begin("after a collection", 0)
        else:
            self._begin("the end of the process, after all tests")
