"""The first things that users of other locks type, and what each of them gets.

A row *works*, because it means the same here, or raises an error that names the form of tenure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Typed:
    """One thing that users type.

    Attributes:
        habit: the libraries that it comes from.
        text: as typed in an asynchronous program, with a `client`, a `lease` where it is named, and
            `tenure`.
        sync: as typed with `tenure.blocking`, which is then named `tenure`; empty: `text` without
            its ``async`` and ``await``.
        says: a part of the error; empty: it works.
        sync_says: a part of the error of the other, if it is another one.
        error: the error's class.
    """

    habit: str
    text: str
    says: str = ""
    sync: str = ""
    sync_says: str = ""
    error: type[Exception] = AttributeError

    def __str__(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def synchronous(self) -> str:
        return self.sync or self.text.replace("async ", "").replace("await ", "")


_RENEWED = "a lease is renewed for as long as it is held"
_HELD = "lease.held is true while the lease is held"
_MUTEX = "client.mutex(name): async with client.mutex(name):"
_SYNC_MUTEX = "client.mutex(name): with client.mutex(name):"

TABLE = (
    # Blocks
    Typed("asyncio threading filelock redis-py", "async with client.mutex('a'):\n    pass"),
    Typed("asyncio", "mutex = client.mutex('a')\nasync with mutex as got:\n    assert got.held"),
    Typed("asyncio", "async with client.semaphore('s', limit=4):\n    pass"),
    Typed("asyncio threading", "async with client.mutex('a').lock():\n    pass"),
    Typed("kazoo", "async with client.mutex(name='a').lock(timeout=5):\n    pass"),
    Typed(
        "threading",
        "with client.mutex('a'):\n    pass",
        "is entered with 'async with'",
        sync="import asyncio\n\nasync def enter():\n    async with client.mutex('a'):\n        pass"
        "\n\nasyncio.run(enter())",
        sync_says="is entered with 'with'",
        error=RuntimeError,
    ),
    Typed(
        "threading",
        "with tenure.connect(url):\n    pass",
        "is entered with 'async with'",
        sync="with tenure.connect(url):\n    pass",
        sync_says="-",
        error=RuntimeError,
    ),
    Typed(
        "asyncio",
        "async with client.mutex('a'):\n    async with client.mutex('a'):\n        pass",
        "acquired at",
        error=RuntimeError,
    ),
    Typed(
        "filelock",
        "@client.mutex('a')\nasync def work():\n    pass",
        "is no decorator",
        error=TypeError,
    ),
    Typed("kazoo", "async with client.election('a'):\n    pass", "campaign()", error=RuntimeError),
    # Connecting
    Typed(
        "redis-py etcd3",
        "other = await tenure.connect(url)\nawait other.mutex('b').locked()\nawait other.aclose()",
        sync="other = tenure.connect(url)\nother.mutex('b').locked()\nother.close()",
    ),
    Typed(
        "redis-py",
        "other = tenure.connect(url)\nawait other.mutex('b').locked()\nawait other.aclose()",
        sync="other = tenure.connect(url)\nother.mutex('b').locked()\nother.close()",
    ),
    Typed("redis-py", "tenure.connect(url=url)"),
    Typed("redis-py", "tenure.connect(host='localhost', port=6379)", "one URL", error=TypeError),
    Typed("kazoo", "tenure.connect(hosts='a:1,b:1')", "one URL", error=TypeError),
    Typed("redis-py", "tenure.connect('localhost:6379')", "URL", error=ValueError),
    Typed("filelock", "tenure.connect('jobs.db')", "sqlite:///jobs.db", error=ValueError),
    Typed("kazoo tooz", "client.start()", "it connects on first use"),
    Typed("kazoo tooz", "client.stop()", "write await client.aclose()", sync_says="client.close()"),
    Typed(
        "redis-py",
        "client.close()",
        "write await client.aclose()",
        sync="client.aclose()",
        sync_says="write client.close()",
    ),
    # Making a lock
    Typed("redis-py etcd3", "client.lock('a')", _MUTEX, sync_says=_SYNC_MUTEX),
    Typed("kazoo", "client.Lock('a')", _MUTEX, sync_says=_SYNC_MUTEX),
    Typed("tooz", "client.get_lock('a')", _MUTEX, sync_says=_SYNC_MUTEX),
    Typed("kazoo", "client.Semaphore('a', 4)", "client.semaphore(name, limit=4)"),
    Typed("kazoo", "client.WriteLock('a')", "recipes.RWLock(client, name)"),
    Typed("kazoo", "client.Election('a')", "client.election(name)"),
    Typed("asyncio threading portalocker", "tenure.Lock('a')", "connect(url), write client.mutex"),
    Typed("threading", "tenure.RLock()", "recipes.ReentrantMutex(client, name)"),
    Typed("filelock", "tenure.FileLock('a')", "connect(url), write client.mutex"),
    Typed("redis-py", "tenure.lock('a')", "connect(url), write client.mutex"),
    Typed("redis-py", "client.mutex('a', timeout=10)", "give it to lock()", error=TypeError),
    Typed("etcd3", "client.mutex('a', ttl=60)", _RENEWED, error=TypeError),
    Typed("python-redis-lock", "client.mutex('a', expire=60)", _RENEWED, error=TypeError),
    Typed("python-redis-lock", "client.mutex('a', auto_renewal=True)", _RENEWED, error=TypeError),
    Typed("python-redis-lock", "client.mutex('a', id='me')", "data=", error=TypeError),
    Typed("redis-py", "client.mutex('a', thread_local=False)", "any task", error=TypeError),
    Typed("asyncio", "client.semaphore('s', value=4)", "limit=", error=TypeError),
    Typed("kazoo", "client.semaphore('s', max_leases=4)", "limit=", error=TypeError),
    Typed("asyncio", "client.semaphore('s', 4)", "positional argument", error=TypeError),
    Typed("tooz", "client.mutex(b'a')", "str", error=ValueError),
    # Acquiring
    Typed("asyncio threading", "await client.mutex('a').acquire()", "lock()"),
    Typed("redis-py", "await client.mutex('a').acquire(blocking=False)", "lock()"),
    Typed("asyncio threading", "client.mutex('a').release()", "release the lease that lock()"),
    Typed("asyncio", "got = await client.semaphore('s', limit=4).acquire()\nawait got.release()"),
    Typed("asyncio", "client.semaphore('s', limit=4).release()", "the lease that acquire()"),
    Typed(
        "threading",
        "await client.semaphore('s', limit=4).acquire(False)",
        "try_acquire() does not wait",
        error=ValueError,
    ),
    Typed(
        "threading",
        "await client.semaphore('s', limit=4).acquire(blocking=False)",
        "try_acquire() does not wait",
        error=TypeError,
    ),
    Typed(
        "redis-py threading",
        "await client.mutex('a').lock(blocking=False)",
        "try_lock() does not wait",
        error=TypeError,
    ),
    Typed("threading", "await client.mutex('a').try_lock(timeout=5)", "lock()", error=TypeError),
    Typed(
        "threading",
        "await client.semaphore('s', limit=4).try_acquire(timeout=5)",
        "give it to acquire()",
        error=TypeError,
    ),
    Typed(
        "redis-py", "await client.mutex('a').lock(blocking_timeout=5)", "timeout=", error=TypeError
    ),
    Typed(
        "threading filelock",
        "await client.mutex('a').lock(timeout=-1)",
        "None, the default, waits for ever",
        error=ValueError,
    ),
    Typed(
        "redis-py", "await client.mutex('a').lock(sleep=0.1)", "without polling", error=TypeError
    ),
    Typed(
        "filelock",
        "await client.mutex('a').lock(poll_interval=1)",
        "without polling",
        error=TypeError,
    ),
    Typed("redis-py", "await client.mutex('a').lock(token='x')", "data=", error=TypeError),
    Typed(
        "portalocker",
        "await client.mutex('a').lock(fail_when_locked=True)",
        "try_lock() does not wait",
        error=TypeError,
    ),
    Typed("asyncio threading redis-py", "assert not await client.mutex('a').locked()"),
    Typed("redis-py", "client.mutex('a').owned()", _HELD),
    Typed("filelock", "client.mutex('a').is_locked", _HELD),
    Typed("etcd3", "client.mutex('a').is_acquired()", _HELD),
    Typed("kazoo", "client.mutex('a').contenders()", "describe(owners=True, waiters=True)"),
    Typed("redis-py python-redis-lock", "client.mutex('a').extend(10)", _RENEWED),
    Typed("etcd3", "client.mutex('a').refresh()", _RENEWED),
    Typed("python-redis-lock", "client.mutex('a').reset()", "client.evict(path, name, order_id)"),
    Typed("tooz", "client.mutex('a').break_lock()", "client.evict(path, name, order_id)"),
    # A lease
    Typed("redis-py", "lease.extend(10)", _RENEWED),
    Typed("redis-py", "lease.owned()", _HELD),
    Typed("tooz", "lease.acquired", _HELD),
    Typed("filelock", "lease.is_locked", _HELD),
    Typed("redis-py", "lease.local.token", "lease.fencing_token"),
    Typed("etcd3", "lease.ttl", "lease.deadline"),
    Typed("filelock", "lease.close()", "lease.release()"),
    Typed(
        "asyncio",
        "client.mutex('b').lock().release()",
        "write 'await' before the call",
        sync="client.mutex('b').lock().release()",
        sync_says="-",
    ),
)
