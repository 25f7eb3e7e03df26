"""The program's part of the reaper: starts it, and registers sessions with it.

Rules:

* The reaper is started by a thread, with the first session, so that no session waits for it.
* A line is sent by the thread that calls, without blocking. What cannot be sent at once is sent by
  the thread.
* A descriptor may have been closed behind Python's back, as by a daemonizing program, and its
  number used again. So it is written to only while it is still the socket.
* A reaper that was killed, or has left, is started again by the next session.
"""

from __future__ import annotations

import _socket  # gevent replaces what uses it
import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict

from tenure.background import BackgroundThread
from tenure.engines.contract import LastWords, Orphan
from tenure.greenlets import close_descriptor, original

_FOLDER = os.path.dirname(__file__)
WAITER = os.path.join(_FOLDER, "waiter.py")
SHELL = "/bin/sh"
IN_BACKGROUND = '"$0" "$@" &'

START = 30.0
"""Seconds within which the process reports that it is watching."""

_ATTEMPTS = 2

IDLE = 60.0
"""Seconds without sessions after which the process leaves."""

_QUIETLY = getattr(_socket, "MSG_NOSIGNAL", 0)
"""A program may have SIGPIPE end it."""

_LEAST_DESCRIPTOR = 10  # above those which the process gets


def missing() -> str | None:
    """Return why this program cannot have a reaper; ``None`` if it can.

    Each reason is a clause for `tenure doctor`.
    """
    name = os.path.basename(sys.executable or "")
    if os.name != "posix" or not (hasattr(os, "pidfd_open") or sys.platform == "darwin"):
        return "this system does not report the death of a process"
    if getattr(sys, "frozen", False) or not name.startswith(("python", "pypy")):
        return "the program runs in no Python interpreter that could be started again"
    if os.getpid() == 1:
        return "the program is process 1 of its container, with which all others end"
    if not os.access(SHELL, os.X_OK):
        return f"there is no {SHELL}"
    if hasattr(os, "pidfd_open"):
        try:
            close_descriptor(os.pidfd_open(os.getpid()))
        except OSError as error:
            return f"the kernel has no pidfd_open ({error.strerror})"
    return None


class _Program:
    """The reaper of this process, as seen by its clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, bytes] = {}  # of the registered sessions
        self._impossible: bool | None = None  # whether this program cannot have one, once known
        self._lingers = False
        self._unsent = bytearray()
        self._control: int | None = None  # the descriptor of the socket
        self._inode = 0
        self._busy = False  # the thread runs
        self._thread = BackgroundThread("tenure-reaper", self._run)
        self._settled = threading.Event()  # cleared while the thread runs
        self._settled.set()

    def put(self, key: str, line: bytes) -> None:
        """Register a session, or replace its registration."""
        if self._impossible is None:
            self._impossible = missing() is not None
        if self._impossible:
            return
        with self._lock:
            self._lines[key] = line
            self._send(line)

    def drop(self, key: str) -> None:
        """Withdraw a session. Safe to call twice."""
        with self._lock:
            if self._lines.pop(key, None) is not None and (self._control is not None or self._busy):
                self._send(f"-{key}\n".encode())

    def descriptor(self) -> int | None:
        """Return a descriptor whose last copy must be closed before sessions are ended.

        It waits for the process to be started.
        """
        if not self.settle():
            return None
        with self._lock:
            self._lingers = True
            self._send(b"linger\n")
            return self._control

    def settle(self) -> bool:
        """Wait until the process watches and knows all sessions; false if there is none."""
        self._settled.wait()
        with self._lock:
            return self._is_ours()

    def forget(self) -> None:
        """Close the copy that a forked child has inherited."""
        if self._is_ours():
            self._disconnect()

    # Sending; under the lock

    def _send(self, line: bytes) -> None:
        self._unsent += line
        if self._busy or (self._control is not None and self._flush()):
            return
        self._busy = True
        self._settled.clear()
        try:
            self._thread = BackgroundThread("tenure-reaper", self._run)
            self._thread.start()
        except (RuntimeError, MemoryError):  # no more threads
            self._discard()

    def _discard(self) -> None:
        self._unsent.clear()  # the next line sends all
        self._end_run()

    def _end_run(self) -> None:
        self._busy = False
        self._settled.set()

    def _flush(self) -> bool:
        """Send what can be sent without blocking; return whether that was everything."""
        if not self._is_ours():
            self._control = None
            return False
        assert self._control is not None
        try:
            with _socket_of(self._control) as control:
                sent = control.send(self._unsent, _socket.MSG_DONTWAIT | _QUIETLY)
        except BlockingIOError:
            return False
        except OSError:  # it was killed
            self._disconnect()
            return False
        del self._unsent[:sent]
        return not self._unsent

    def _is_ours(self) -> bool:
        if self._control is None:
            return False
        with contextlib.suppress(OSError):
            if os.fstat(self._control).st_ino == self._inode:
                return True
        self._control = None  # the number may belong to another file by now
        return False

    def _disconnect(self) -> None:
        if self._is_ours() and self._control is not None:
            close_descriptor(self._control)
        self._control = None

    # The thread

    def _run(self) -> None:
        """Send what is unsent, to a new process if there is none or it is lost meanwhile."""
        for _ in range(_ATTEMPTS):
            with self._lock:
                connected = self._is_ours()
                if not connected and not self._lines:
                    self._discard()
                    return
            if (connected or self._connect()) and self._send_all():
                return
        with self._lock:
            self._discard()

    def _connect(self) -> bool:
        try:
            control = _start()
        except OSError:
            return False
        with self._lock:
            self._control = control
            self._inode = os.fstat(control).st_ino
            self._unsent[:] = b"".join((_environment(), *self._lines.values()))
            if self._lingers:
                self._unsent += b"linger\n"
        return True

    def _send_all(self) -> bool:
        while True:
            with self._lock:
                if not self._is_ours():
                    return False
                control, chunk = self._control, bytes(self._unsent)
                self._unsent.clear()
                if not chunk:
                    self._end_run()
                    return True
            assert control is not None
            try:
                with _socket_of(control) as connection:
                    connection.settimeout(None)
                    connection.sendall(chunk, _QUIETLY)
            except OSError:  # it was killed, or the descriptor was closed
                with self._lock:
                    self._disconnect()
                return False


def _environment() -> bytes:
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        folder = "/"
    environment = {
        "folder": folder,
        "path": [os.path.join(folder, each) for each in sys.path if isinstance(each, str)],
        "package": os.path.dirname(_FOLDER),
    }
    return f"program {json.dumps(environment)}\n".encode()


@contextlib.contextmanager
def _socket_of(descriptor: int) -> Iterator[_socket.socket]:
    """Use the socket for a call; nothing is reported when the program ends without closing it."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _start() -> int:
    """Start the process, and return the program's end of its socket.

    Raises:
        OSError: it could not be started.
    """
    import fcntl

    ours, theirs = (each.detach() for each in _socket.socketpair())
    opened = [theirs]
    try:
        if hasattr(os, "pidfd_open"):
            opened.append(os.pidfd_open(os.getpid()))
        else:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        passed = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _LEAST_DESCRIPTOR) for each in opened]
        opened += passed
        shell = original("os", "posix_spawn")(
            SHELL,
            [
                *(SHELL, "-c", IN_BACKGROUND),
                *(sys.executable, "-I", "-S", WAITER, str(os.getpid()), str(IDLE)),
            ],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                (os.POSIX_SPAWN_DUP2, 0, 2),
                (os.POSIX_SPAWN_DUP2, passed[1], 3),
                (os.POSIX_SPAWN_DUP2, passed[0], 4),
            ],
            setsigmask=[],
        )
        while opened:
            close_descriptor(opened.pop())
        with contextlib.suppress(ChildProcessError):  # the program has waited for all children
            original("os", "waitpid")(shell, 0)
        with _socket_of(ours) as control:
            control.settimeout(START)
            if not control.recv(1):
                raise ConnectionAbortedError("the process has ended")
            control.settimeout(None)
    except BaseException:
        for each in (ours, *opened):
            close_descriptor(each)
        raise
    return ours


_program = _Program()


def _forked() -> None:
    global _program
    inherited, _program = _program, _Program()
    inherited.forget()


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_forked)


def descriptor() -> int | None:
    """Return a descriptor for a child whose life prolongs that of the program's sessions.

    The reaper ends them when the program is dead and the last copy of the descriptor is closed.
    ``None`` without a reaper. Blocks until the reaper has been started.
    """
    return _program.descriptor()


def settled() -> bool:
    """Wait until the reaper of this program watches; false if there is none."""
    return _program.settle()


class Registrations:
    """The sessions of one client that are to be ended after the death of the program.

    Args:
        url: the URL of the store, with its secrets.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: set[str] = set()

    def put(self, orphan: Orphan, words: LastWords | None = None) -> None:
        """Register a session, or replace its registration."""
        fields = {"url": self._url, **asdict(orphan)}
        if words is not None:
            fields |= {"place": words.place, "words": words.data.hex()}
        key = self._key(orphan.session_id)
        self._keys.add(key)
        line = f"+{key} {orphan.recovery_window} {json.dumps(fields)}\n"
        _program.put(key, line.encode())

    def drop(self, session_id: int) -> None:
        """Withdraw a session. Safe to call twice, and in a forked child."""
        self._drop(self._key(session_id))

    def close(self) -> None:
        """Withdraw all sessions. Safe to call twice."""
        for key in list(self._keys):
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._keys.discard(key)
        _program.drop(key)

    def _key(self, session_id: int) -> str:
        return f"{id(self)}.{session_id}"
