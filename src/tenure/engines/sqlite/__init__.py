"""``sqlite:///file``: a durable store in one file, for all processes of one host, without a daemon.

The rows of the file are the only state; no process keeps a copy. To change something, a process
takes the *turn* (a kernel lock that one process holds at a time), changes rows in one transaction,
and notifies the affected participants.

The modules, from the bottom up:

* ``url`` and ``files``: the location of the store, and its checks.
* ``schema`` and ``checkpoint``: the tables, the connections to them, and SQLite's log.
* ``liveness``: the liveness file and the heartbeats of each participant.
* ``protection``: locks that keep SQLite's log in place, and new programs from a replaced one.
* ``forking``: keeps forks away from open connections.
* ``notifier``: notification of other processes, and of their deaths.
* ``watches``: the watches of a process.
* ``transaction``: the lock that orders writers, and the transaction in it.
* ``expiry``, ``requests``, ``nodes``, ``sessions`` and ``participants``: the rules, as SQL
  statements. They use a connection only through their transaction.
* ``store``: decides when, and on which thread, the statements run.
* ``descriptions``: descriptions of nodes, semaphores and sessions.
* ``monitor``: checks the waiters, and delivers events to the sessions.
* ``engine`` and ``session``: the engine contract.
* ``doctor``: diagnoses a store that may be broken.
* ``restore``: copies a store, and restores it.

The portable mode
=================

``?portable=true`` selects it, and a system without the kernel's locks (Windows) has no other. It
needs nothing but SQLite and plain files. What replaces the kernel's means:

* *The turn* is SQLite's own write transaction (`transaction.DatabaseTurn`). A process that waits
  for it polls, so that writers have no order among themselves. The queues keep theirs.
* *Liveness* is by window only. The liveness file has no lock: no participant is ever found dead,
  and a session ends when its heartbeat is older than its window. The rules of `liveness` for
  silent sessions do not depend on locks, and neither does the safety of the mode: a checking
  process reads the clock and then the heartbeat; a renewing one reads the clock again after
  writing, and has proven nothing if the window had passed by then. So a program considers its
  leases lost before another process can be granted them. Both need one clock for all processes of
  the host. Suspension may count or not: it does for all of them alike.
* *Presence*: each participant also writes a heartbeat of its own, in slot 0, with every tick. It
  decides only what cannot break exclusion: which sessions are examined for silence, whether
  detached sessions get their grace period, and when the files of a participant are removed that
  has neither a session nor written for a day.
* *Notification* is replaced by polling (`monitor.POLL`).
* *The boot id* is replaced by the name of the clock, which must be the same for all programs of a
  store (`liveness.clock_id`), and by a comparison: a reading in the store that is later than the
  clock shows that the machine was restarted (`participants.was_restarted`). A restart that it does
  not show has made no reading later than the clock. Then sessions from before it expire by their
  windows, counted from those readings.

States of a participant: *present* (its own heartbeat is recent), *absent*, and *left behind* (no
session, and no heartbeat for a day: it is removed). States of a session that is attached: *proven*
(its heartbeat is within its window) and *silent*. No renewal leads from silent to proven; the first
transaction that examines it ends it, or detaches it at the first opening after a pause.

One store has one mode, because a lock of one mode means nothing in the other. The application id of
the database records it. It is set with the tables, and checked when a connection is opened and in
the transaction that finds or creates the tables. So two programs that create a store in different
modes at once cannot both succeed.
"""

from __future__ import annotations

from tenure.clock import Clock
from tenure.engines.contract import Engine

__all__ = ["connect"]


def connect(url: str, clock: Clock) -> Engine:
    """Return the engine for a ``sqlite://`` URL. It is not open yet.

    Raises:
        InvalidArgument: the URL is malformed.
        Unsupported: it requests the native mode on Windows.
    """
    from tenure.engines.sqlite.engine import SqliteEngine
    from tenure.engines.sqlite.url import parse

    return SqliteEngine(parse(url), clock)
