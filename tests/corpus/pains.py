"""The pains: defects of other locks, where they were reported, and what tenure does instead.

They keep their numbers for ever, so that documents can name them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pain:
    """One of them.

    Attributes:
        number: stays the same for ever.
        what: what hurt.
        others: who had it: projects, with the numbers in their issue trackers.
        answer: what tenure does instead.
        awaits: what is not checked yet, because it concerns an engine that is not here.
    """

    number: int
    what: str
    others: str
    answer: str
    awaits: str = ""


PAINS = (
    Pain(
        1,
        "A lock is lost, and the code that relies on it is not notified.",
        "redisson 3854, 4698; kazoo 565; etcd 6127",
        "The body of the block is cancelled and the block raises `LeaseLost`. Code outside of a "
        "block reads `lease.held`, or awaits `lease.wait_lost()`.",
    ),
    Pain(
        2,
        "A busy event loop does not get to renew, and a healthy program loses its lock.",
        "python-redis-lock 85, 91",
        "A thread renews when the loop does not. It stops after `max_stall`, so that a program "
        "that hangs does not hold for ever. The stall is reported.",
    ),
    Pain(
        3,
        "An acquire that is cancelled while its answer is on the way leaves a lock without an "
        "owner, which never ends.",
        "redis-py (seen in 8.1: with 100 ms of delay and a timeout of 50 ms the key stays, without "
        "an expiry); greptimedb 7670 (an advisory lock)",
        "A request has its number before it is sent, so that it can be withdrawn without having "
        "been answered. Every stored request belongs to a session, which ends.",
    ),
    Pain(
        4,
        "A release that is cancelled leaves the lock held.",
        "redis-py 3847",
        "The session owns a release once it has started, and completes it even if the caller is "
        "cancelled. A release may be repeated.",
    ),
    Pain(
        5,
        "After a cancelled command the next one reads its answer.",
        "redis-py 2624, 2665",
        "Callers wait for futures of their own. The owner of the connection matches answers to "
        "commands, also when the caller no longer waits.",
    ),
    Pain(
        6,
        "The release fails, and its error takes the place of the one that the body raised.",
        "open-webui 29979; coredis 370",
        "The body's error is raised, with a note about the release, which is tried again.",
    ),
    Pain(
        7,
        "One failed renewal ends every lease; or all renewals fail, and the holder continues.",
        "PostHog 56781",
        "Renewals are repeated until the deadline, which lies before the end of the window by a "
        "margin. A lease is lost then, or when the store says so, and not otherwise.",
    ),
    Pain(
        8,
        "A waiter whose session is over waits on, or even wins.",
        "etcd 9921, 11456, 19597",
        "A waiter is notified of the end of its session, and a grant counts only while that lives.",
    ),
    Pain(
        9,
        "After a reconnect there are two leaders, and the former one does not know.",
        "curator 1024, 1169, 1211",
        "A grant belongs to one session. With that it ends, and no later session brings it back.",
    ),
    Pain(
        10,
        "A contender that has timed out, or whose answer was lost, stays in the queue.",
        "kazoo 760",
        "A request with an unknown outcome is withdrawn by its number. The withdrawal is repeated "
        "until it is confirmed or the session has ended.",
    ),
    Pain(
        11,
        "A failover of Redis forgets a lock that it had granted.",
        "redisson 2669",
        "The holder is notified when its program meets a server that does not know the lock. "
        "Tokens go on rising. With `min_replicas=N` a grant is reported once N replicas have it.",
    ),
    Pain(
        12,
        "There is no number by which the data's own store could refuse a late writer.",
        "redisson 4684; bsm/redislock 93",
        "Every lease has a fencing token, which rises over the whole store; `tenure.fencing` has "
        "fences for SQL, Redis and objects in memory, which refuse an older one.",
    ),
    Pain(
        13,
        "A clock is set, and locks end.",
        "valkey 2651",
        "A holder's deadline is on a clock that cannot be set; it counts from the moment when the "
        "request was sent.",
    ),
    Pain(
        14,
        "A client may be configured to consider a lease held for longer than the store does.",
        "ydb-rs-sdk 402; kubernetes 44887",
        "Intervals and margins are derived from the window, and what cannot fit is refused.",
    ),
    Pain(
        15,
        "Waiters poll, and the last to arrive may be served first.",
        "python-redis-lock 58, 104",
        "One queue, first come, first served, and a release hands over to the next.",
    ),
    Pain(
        16,
        "A fair queue is stuck behind a waiter that has died.",
        "redisson 1353, 3730",
        "Waiters belong to sessions as owners do, and leave the queue with them.",
    ),
    Pain(
        17,
        "The permits of a crashed holder are never released.",
        "redisson 2045, 4462",
        "A permit belongs to a session, and is free when that is over.",
    ),
    Pain(
        18,
        "Peers that were started with different limits let in more than either allows.",
        "Curator's semaphores; `consul lock -n`",
        "The limit is stored with the semaphore. A program with another one gets an error.",
    ),
    Pain(
        19,
        "The command that was started under a lock outlives it, and its exit code does not show "
        "the loss.",
        "`etcdctl lock` (two holders after a revoked lease, exit code 0); consul 873, 9788",
        "A guardian ends the command, with all that it has started, by a deadline of its own; the "
        "exit code says that the lock was lost.",
    ),
    Pain(
        20,
        "After a fork the child hangs, or acts in its parent's name.",
        "kazoo 519, 554, 628",
        "The child gets an error that says what to do.",
    ),
    Pain(
        21,
        "Waiting for a lock blocks the thread, and with it everything in its event loop.",
        "kazoo 185",
        "Everything that waits is a coroutine; `tenure.blocking` is the same for threads.",
    ),
    Pain(
        22,
        "Ownership is kept per thread, so that every task of the thread owns the lock.",
        "dogpile.cache 171",
        "The lease object is the ownership, and a second request of the same session is a second "
        "request.",
    ),
    Pain(
        23,
        "A task that acquires again what it holds waits for itself.",
        "python-redis-lock 118; kazoo 292",
        "Locks are not re-entrant; a task that waits for what it is inside of gets `SelfDeadlock` "
        "at once.",
    ),
    Pain(
        24,
        "A watch misses changes, and its last state is not the present one.",
        "python-etcd3 729; kazoo 151",
        "A watch may skip states, and never the newest.",
    ),
    Pain(
        25,
        "Contention cannot be seen: which program waits, for which holder, and for how long.",
        "opencti 17341; codex-lb 1682",
        "Every queue can be listed with its owners and waiters, and events have the time "
        "for which each lease was waited for and held.",
    ),
    Pain(
        26,
        "Behind a transaction pooler an advisory lock belongs to a connection that other programs "
        "use as well: two of them have the lock, or the release goes to another connection and the "
        "lock stays.",
        "authentik 23876; hindsight 726; with_advisory_lock 43, 45; DistributedLock 168; "
        "pgbouncer 418, 617",
        "A lock is rows, changed by one statement. No statement depends on the connection that it "
        "is sent over.",
    ),
    Pain(
        27,
        "The connection that has an advisory lock ends, and the next program gets the lock while "
        "the first one works on.",
        "prometheus-postgresql-adapter 91; prom-analytics-proxy 587; DistributedLock 230",
        "A lock belongs to a session, which outlives connections by its recovery window. The "
        "program reconnects and keeps the lock, or ends its work before that window does.",
    ),
    Pain(
        28,
        "The names of two locks have the same hash, and unrelated jobs wait for each other.",
        "symfony 58838; khora 738; Aletheore 446",
        "The name is the key, as it is.",
    ),
    Pain(
        29,
        "Every waiter occupies a connection to the database, until there is none left.",
        "tupaia 6638; pikku 1314; binded/advisory-lock 1",
        "Waiting is a row in the queue. All waiters of a program share its connections, three at "
        "the most, and are notified.",
    ),
)
