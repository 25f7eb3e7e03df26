"""Options of a listener for dflockd's clients; a dflockd server has the same."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DflockdOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DflockdOptions:
    """Times are seconds; 0 waiters mean that any number is right.

    Attributes:
        node: where the locks are.
        default_lease: for a client that names no lease.
        sweep_interval: between two looks for leases that have run out.
        gc_interval: between two looks for unused keys.
        gc_max_idle: that an unused key is kept.
        max_locks: keys at a time, unused ones included; ``None``: what the server's limit
            ``semaphores`` says.
        max_waiters: that wait for one key; ``None``: what the limit ``queue_length`` says.
        read_timeout: that a client may be silent.
        write_timeout: that a client may leave replies unread.
        shutdown_time: that clients have to leave by themselves when the server ends; ``None``: for
            ever.
        auto_release: what a connection holds is released with its end; else it is kept for its
            lease.
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
