"""``sqlite:///file``: a durable store in one file, for all processes of one host, without a daemon.

The rows of the file are the only state; no process keeps a copy. To change something, a process
takes the *turn* (a kernel lock that one process holds at a time), changes rows in one transaction,
and notifies the affected participants.

The modules, from the bottom up:

* ``url`` and ``files``: the location of the store, and its checks.
* ``schema`` and ``checkpoint``: the tables, the connections to them, and SQLite's log.
* ``liveness``: the liveness file and the heartbeats of each participant.
* ``protection``: locks that keep SQLite's log in place, and new programs from a replaced one.
* ``watches``: the watches of a process, and notification of other processes.
* ``transaction``: the lock that orders writers, and the transaction in it.
* ``expiry``, ``requests``, ``nodes``, ``sessions`` and ``participants``: the rules, as SQL
  statements. They use a connection only through their transaction.
* ``store``: decides when, and on which thread, the statements run.
* ``descriptions``: descriptions of nodes, semaphores and sessions.
* ``monitor``: notifies sessions, and checks the waiters.
* ``engine`` and ``session``: the engine contract.
* ``doctor``: diagnoses a store that may be broken.
* ``restore``: copies a store, and restores it.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.errors import Unsupported

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """Return the engine for a ``sqlite://`` URL. It is not open yet.

    Raises:
        InvalidArgument: the URL is malformed.
        Unsupported: on Windows, which has neither the locks nor the sockets for this.
    """
    _check_platform()
    from tenure.engines.sqlite.engine import SqliteEngine
    from tenure.engines.sqlite.url import parse

    return SqliteEngine(parse(url), clock)


def _check_platform() -> None:
    try:
        import fcntl  # noqa: F401  only to check that this system has it
    except ImportError as error:
        raise Unsupported(
            "sqlite:// needs Linux or macOS (Windows has neither the locks nor the sockets for "
            "it). Use memory:// within one program, a server (redis://, etcd:// or tenure://), or "
            "WSL"
        ) from error
