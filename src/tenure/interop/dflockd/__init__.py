"""The lock and the semaphore of dflockd's clients, made of tenure's primitives on ``dflockd://``.

They share their keys with dflockd's clients in other languages, and have the same names and
options. `tenure.interop.dflockd.blocking` has the same for threads.

As in those clients, an object is one holder: it connects when it acquires or enqueues, and
disconnects after a release or an unsuccessful wait. Unlike them it renews in time even while the
program's loop is busy, and `with_lock` cancels the work when the lock is lost.
"""

from __future__ import annotations

from tenure.interop.dflockd.lock import (
    DistributedLock,
    DistributedSemaphore,
    Enqueued,
    OnLockLost,
)

__all__ = ["DistributedLock", "DistributedSemaphore", "Enqueued", "OnLockLost"]
