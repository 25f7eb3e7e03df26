"""Options of a listener for dflockd's clients, which correspond to those of a dflockd server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DflockdOptions:
    """Options of a listener. Times are seconds.

    Attributes:
        node: the node of the locks.
        default_lease: lease of clients that specify none.
        sweep_interval: time between two checks for expired leases.
        gc_interval: time between two checks for unused keys.
        gc_max_idle: time that an unused key is kept.
        max_locks: maximum number of keys, including unused ones; ``None``: the server's limit
            ``semaphores``.
        max_waiters: maximum number of waiters for a key, 0 for any number; ``None``: the server's
            limit ``queue_length``.
        read_timeout: time that a client may be silent.
        write_timeout: time that a client may leave replies unread.
        shutdown_time: time for clients to disconnect when the server ends; ``None``: for ever.
        auto_release: whether a connection's locks are released at its end; otherwise they are kept
            for their leases.
    """

    node: str = "/dflockd"
    default_lease: int = 33
    sweep_interval: float = 1.0
    gc_interval: float = 5.0
    gc_max_idle: float = 60.0
    max_locks: int | None = None
    max_waiters: int | None = None
    read_timeout: float = 23.0
    write_timeout: float = 5.0
    shutdown_time: float | None = 0.0
    auto_release: bool = True
