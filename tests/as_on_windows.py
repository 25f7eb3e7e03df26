"""A program without what Windows does not have: `python -m tests.as_on_windows FILE ARGUMENT...`.

The modules, functions and constants of Unix are taken away, and the event loop is one that waits
neither for descriptors nor for signals, as asyncio's own on Windows. Libraries that were made for
this machine are imported before, because they look for Windows' modules otherwise. What only
Windows can show, such as its sockets' errors, is shown by the workflow that runs there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import runpy
import signal
import socket
import sys
import sysconfig
import time
from typing import Any

LIBRARIES = (
    *("click.shell_completion", "grpc", "hiredis", "hpack", "msgspec", "psycopg"),
    "multiprocessing.connection",
    *("rich.console", "rich.live", "rich.table", "rich.traceback", "ydb"),
)
MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
MISSING: dict[Any, str] = {
    os: "fork register_at_fork pidfd_open getuid geteuid getgid getegid O_DIRECTORY O_NOFOLLOW "
    "O_CLOEXEC O_NONBLOCK sched_getaffinity sched_yield chown fchmod fchown getpgid setsid killpg "
    "mkfifo pread pwrite uname sysconf statvfs getgroups setpgid waitid eventfd memfd_create "
    "fdatasync openpty getloadavg nice getsid",
    socket: "AF_UNIX SCM_RIGHTS SO_PEERCRED MSG_DONTWAIT SO_REUSEPORT send_fds recv_fds CMSG_LEN",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGSTOP SIGCONT SIGTSTP SIGWINCH "
    "SIGPIPE SIGQUIT setitimer ITIMER_REAL pthread_sigmask pthread_kill sigwait alarm pause",
    time: "clock_gettime clock_gettime_ns CLOCK_MONOTONIC CLOCK_BOOTTIME CLOCK_REALTIME",
}


class _Hidden:
    """Finds no module of Unix."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _no_signals(*_: object) -> None:
    raise NotImplementedError


class SelectorEventLoop(asyncio.SelectorEventLoop):
    """Waits for sockets, and not for signals."""

    add_signal_handler = remove_signal_handler = _no_signals  # type: ignore[assignment]


class ProactorEventLoop(SelectorEventLoop):
    """Waits for neither, unless asyncio itself does."""


def _of_asyncio_alone(name: str) -> None:
    really = getattr(asyncio.SelectorEventLoop, name)

    def method(self: ProactorEventLoop, *arguments: Any) -> Any:
        if not sys._getframe(1).f_globals["__name__"].startswith("asyncio"):
            raise NotImplementedError
        return really(self, *arguments)

    setattr(ProactorEventLoop, name, method)


class _Policy(asyncio.DefaultEventLoopPolicy):
    _loop_factory = ProactorEventLoop


def _socketpair(*_: object) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


def hide() -> None:
    """Take away what Windows does not have, in this process."""
    for each in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(each)
    sysconfig.get_config_vars()
    for each in MODULES:
        sys.modules.pop(each, None)
    sys.meta_path.insert(0, _Hidden())
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    socket.socketpair = _socketpair  # type: ignore[assignment]
    for name in ("add_reader", "add_writer", "remove_reader", "remove_writer"):
        _of_asyncio_alone(name)
    asyncio.SelectorEventLoop = SelectorEventLoop
    asyncio.ProactorEventLoop = ProactorEventLoop  # type: ignore[attr-defined]
    asyncio.set_event_loop_policy(_Policy())
    sys.platform = "win32"


if __name__ == "__main__":
    hide()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
