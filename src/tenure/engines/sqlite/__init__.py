"""``sqlite:///file``: any number of processes of one host on one file, durable, without a daemon.

The rows of the file are the truth; no process keeps a copy of the state. Who wants to change
something takes the *turn* (a lock of the kernel, handed round among the processes), changes rows
in one transaction, and rings those whom it concerns.

From the bottom up: ``url`` and ``files`` say which file and whether it may be trusted, ``schema``
what is in it, ``turn`` whose turn it is, ``life`` who is alive, ``bell`` how others are woken;
``transaction``, ``requests``, ``sessions``, ``nodes`` and ``describe`` are the statements;
``committer`` decides when and on which thread they run; ``engine`` and ``session`` fulfil the
contract. ``doctor`` examines a store that may be broken; ``backup`` and ``restore`` copy one, and
``quarantine`` is what a restored store waits for.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.errors import Unsupported

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """The connector of ``sqlite://``.

    Raises:
        InvalidArgument: there is something wrong with the URL.
        Unsupported: on Windows, which has neither the locks nor the sockets for this.
    """
    _check_platform()
    from tenure.engines.sqlite.engine import SqliteEngine
    from tenure.engines.sqlite.url import parse

    return SqliteEngine(parse(url), clock)


def _check_platform() -> None:
    try:
        import fcntl  # noqa: F401  only to see whether this system has it
    except ImportError as error:
        raise Unsupported(
            "sqlite:// needs Linux or macOS (Windows has neither the locks nor the sockets for "
            "it); use memory:// within one program, a server (redis://, etcd:// or tenure://), or "
            "WSL"
        ) from error
