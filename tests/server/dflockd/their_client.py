"""What a program with PyPI's dflockd-client does and sees; run under a Python that has it.

python their_client.py PORT TOKEN
"""

import asyncio
import sys

from dflockd_client import (
    AsyncDistributedLock,
    AsyncDistributedSemaphore,
    LimitMismatchError,
    SyncDistributedLock,
    SyncDistributedSemaphore,
    fence_from_token,
)
from dflockd_client._async import authenticate, open_conn, stats

PORT, TOKEN = int(sys.argv[1]), sys.argv[2]
WHERE = {"servers": [("127.0.0.1", PORT)], "auth_token": TOKEN}


async def locks() -> None:
    one = AsyncDistributedLock("job", acquire_timeout_s=5, lease_ttl_s=20, **WHERE)
    two = AsyncDistributedLock("job", acquire_timeout_s=0, **WHERE)
    assert await one.acquire()
    assert one.lease == 20
    first = fence_from_token(one.token)
    assert not await two.acquire()
    three = AsyncDistributedLock("job", acquire_timeout_s=5, **WHERE)
    assert await three.enqueue() == "queued"
    waiting = asyncio.create_task(three.wait(5))
    await one.release()
    assert await waiting
    assert three.lease == 33
    assert fence_from_token(three.token) > first
    await three.release()
    async with AsyncDistributedLock("job", **WHERE) as four:
        assert fence_from_token(four.token) > first


async def renewal() -> None:
    lock = AsyncDistributedLock("renewed", lease_ttl_s=2, **WHERE)
    other = AsyncDistributedLock("renewed", acquire_timeout_s=0, **WHERE)
    assert await lock.acquire()
    await asyncio.sleep(3)  # longer than the lease, which it renews every second
    assert not await other.acquire()
    await lock.release()
    assert await other.acquire()
    await other.release()


async def semaphores() -> None:
    pool = [
        AsyncDistributedSemaphore("pool", limit=2, acquire_timeout_s=0, **WHERE) for _ in range(3)
    ]
    assert [await each.acquire() for each in pool] == [True, True, False]
    try:
        await AsyncDistributedSemaphore("pool", limit=3, **WHERE).acquire()
    except LimitMismatchError:
        pass
    else:
        raise AssertionError("another limit was accepted")
    conn = await open_conn("127.0.0.1", PORT, ssl_context=None, connect_timeout_s=5)
    await authenticate(conn, TOKEN)
    told = await stats(conn)
    assert [(each["key"], each["holders"]) for each in told["semaphores"]] == [("pool", 2)]
    await conn.close()
    for each in pool[:2]:
        await each.release()


def in_threads() -> None:
    with SyncDistributedLock("job", **WHERE) as lock:
        assert fence_from_token(lock.token)
        assert not SyncDistributedLock("job", acquire_timeout_s=0, **WHERE).acquire()
    pool = SyncDistributedSemaphore("threads", limit=1, **WHERE)
    assert pool.enqueue() == "acquired"
    assert pool.wait(1)
    pool.release()


async def wrong_token() -> None:
    try:
        await AsyncDistributedLock("job", servers=WHERE["servers"], auth_token="wrong").acquire()
    except PermissionError:
        return
    raise AssertionError("a wrong token was accepted")


async def main() -> None:
    await asyncio.gather(locks(), renewal(), semaphores(), wrong_token())
    await asyncio.to_thread(in_threads)


asyncio.run(main())
sys.stdout.write("all is well\n")
