"""Mistakes with handles get an error that names the remedy."""

from __future__ import annotations

import _thread
import copy
import pickle
import queue
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tenure
from tenure import Misuse, blocking
from tenure._client import handles as internals


async def handles(client: tenure.Client) -> list[Any]:
    session = await client.session()
    lease = await session.mutex("a").lock()
    ticket = await session.semaphore("b", ephemeral=True).enqueue()
    blocks = [client, session, lease, ticket, client.events(), session.mutex("c").lock()]
    return [*blocks, session.semaphore("b", ephemeral=True).watch(owners=True)]


async def test_an_asynchronous_block_entered_with_with_says_async_with() -> None:
    async with tenure.connect("memory://handles") as client:
        made = await handles(client)
        for handle in made:
            with pytest.raises(Misuse, match=r"is entered with 'async with'.*blocking"), handle:
                raise AssertionError("entered")


def test_a_block_for_threads_entered_with_async_with_says_with() -> None:
    async def enter(handle: Any) -> None:
        async with handle:
            raise AssertionError("entered")

    with blocking.connect("memory://handles") as client, client.mutex("a").lock() as lease:
        for handle in (client, lease, client.session()):
            with pytest.raises(Misuse, match=r"is entered with 'with'.*import tenure"):
                enter(handle).send(None)


async def test_a_handle_cannot_be_pickled_or_copied() -> None:
    async with tenure.connect("memory://handles") as client:
        made = [*await handles(client), client.mutex("a"), client.election("d")]
        for handle in [*made, client.semaphore("e")]:
            for carry in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(Misuse, match=r"belongs to this process.*call connect\(\)"):
                    carry(handle)
        made.append(await next(handle for handle in made if "to be awaited" in repr(handle)))


def test_a_handle_for_threads_cannot_be_pickled() -> None:
    with (
        blocking.connect("memory://handles") as client,
        pytest.raises(Misuse, match="belongs to this process"),
    ):
        pickle.dumps(client.mutex("a"))


@pytest.mark.parametrize(
    ("data", "remedy"),
    [("text", r"text\.encode\(\)"), (bytearray(b"x"), r"bytes\(\.\.\.\)"), (None, "NoneType")],
)
async def test_data_that_is_not_bytes_is_refused_with_the_remedy(data: Any, remedy: str) -> None:
    async with tenure.connect("memory://handles") as client:
        pool = client.semaphore("pool")
        await pool.create(limit=2)
        lease = await pool.acquire()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: client.mutex("a").try_lock(data=data),
            lambda: pool.acquire(data=data),
            lambda: pool.update(data),
            lambda: client.semaphore("other").create(1, data),
            lambda: client.election("b").campaign(data),
        ]
        for call in calls:
            with pytest.raises(tenure.InvalidArgument, match=f"data is bytes, not.*{remedy}"):
                await call()
        if data is not None:
            with pytest.raises(tenure.InvalidArgument, match=remedy):
                await lease.update(data)


def test_a_call_without_a_line_of_the_program_on_its_stack_has_an_unknown_site() -> None:
    source = "def run(tell):\n    tell(look())\ndef look():\n    return call_site()\n"
    inside = dict(vars(internals))
    exec(compile(source, internals.__file__, "exec"), inside)
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    _thread.start_new_thread(inside["run"], (told.put,))  # threading's own lines would be on it
    assert told.get(timeout=30) == internals.UNKNOWN
