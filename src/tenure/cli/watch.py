"""`tenure watch`: a line for each state of a semaphore, a mutex or an election.

The name need not exist. It may become an ephemeral or a lasting semaphore, or disappear, while it
is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import stat
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

import tenure
from tenure._client.watch import Watch
from tenure.cli.look import count, describe_program, held, kind, semaphore_json
from tenure.cli.options import (
    json_option,
    name_argument,
    node_option,
    run_async,
    url_option,
    watch_options,
)
from tenure.cli.output import print_json_line, safe, say, shown_data
from tenure.cli.store import open_store

OWNERS = 3
"""Number of owners shown in a line; with ``--json`` all are shown."""


@click.command()
@name_argument
@node_option
@watch_options("state")
@json_option
@url_option
def watch(name: str, node: str, limit: int | None, *, once: bool, as_json: bool) -> None:
    """Show each new state of NAME.

    NAME is a mutex, a semaphore or an election; it need not exist yet. The current state is shown
    first; another follows when the owners or the data have changed. Changes in quick succession may
    be shown as one, but the last state is always shown. Waiters are counted, but a change of only
    their number shows no new state.

    With --json each state is one object on a line of its own. Ends with --count, with Ctrl-C (exit
    code 130), or when its output is closed.
    """

    def show(described: tenure.SemaphoreDescription) -> bool:
        if as_json:
            print_json_line(state_json(described, node))
        else:
            say(f"{time.strftime('%H:%M:%S')}  {shown_state(described)}")
        return True

    run_async(show_states(name, node, show, 1 if once else limit))


async def show_states(
    name: str,
    node: str,
    show: Callable[[tenure.SemaphoreDescription], bool],
    limit: int | None,
) -> None:
    """Show the states of a semaphore, until `limit` of them have been shown.

    Args:
        name: the name of the semaphore.
        node: its node.
        show: prints a state and returns true, or skips it and returns false.
        limit: number of states to show; ``None`` for all.
    """
    shown = 0
    async with (
        open_store() as client,
        contextlib.aclosing(states(client, node, name)) as following,
    ):
        async for described in following:
            shown += show(described)
            sys.stdout.flush()
            if shown == limit:
                return


async def states(
    client: tenure.Client, node: str, name: str
) -> AsyncGenerator[tenure.SemaphoreDescription, None]:
    """Yield the states of a semaphore, ephemeral or not; end when our output has no reader.

    Raises:
        NodeNotFound: there is no such node.
        EngineUnavailable, EngineError: the store failed.
    """
    latest: object = None
    with output_gone() as gone:
        async for attempt in client.sessions(node, description="tenure watch"):
            async with attempt as session:
                ephemeral = True
                while True:
                    semaphore = session.semaphore(name, ephemeral=ephemeral)
                    try:
                        async with semaphore.watch(data=True, owners=True) as watching:
                            async for described in _until(gone, watching):
                                seen = (described.ephemeral, described.data, _owned(described))
                                # Otherwise repeated by a new semaphore or a new session.
                                if seen != latest:
                                    latest = seen
                                    yield described
                        return
                    except tenure.SemaphoreNotFound:
                        ephemeral = True
                    except tenure.InvalidArgument:
                        if not ephemeral:
                            raise
                        ephemeral = False


def _owned(described: tenure.SemaphoreDescription) -> object:
    return [(owner.order_id, owner.count, owner.data) for owner in described.owners]


async def _until(
    gone: asyncio.Future[None], watching: Watch[tenure.SemaphoreDescription]
) -> AsyncIterator[tenure.SemaphoreDescription]:
    """Yield the watched states until our output has no reader."""
    closing = asyncio.create_task(_close_after(gone, watching))
    try:
        async for described in watching:
            if gone.done():
                raise BrokenPipeError
            yield described
        if gone.done():
            raise BrokenPipeError
    finally:
        closing.cancel()


async def _close_after(gone: asyncio.Future[None], watching: Watch[Any]) -> None:
    await asyncio.wait([gone])
    await watching.aclose()


@contextmanager
def output_gone() -> Iterator[asyncio.Future[None]]:
    """Wait until the reader of our output has closed its end (`tenure watch x | head -1`).

    A write would notice it too, but may be hours away.
    """
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    number = _pipe()
    if number is None:
        yield gone
        return

    def look() -> None:
        poll = select.poll()
        poll.register(number, 0)
        if any(happened & (select.POLLERR | select.POLLHUP) for _, happened in poll.poll(0)):
            loop.remove_reader(number)
            if not gone.done():
                gone.set_result(None)

    # Nothing can be read from it; the kernel reports the error without a request.
    loop.add_reader(number, look)
    try:
        yield gone
    finally:
        loop.remove_reader(number)


def _pipe() -> int | None:
    """Descriptor of our output, if it is a pipe or a socket."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number = sys.stdout.fileno()
        mode = os.fstat(number).st_mode
        if stat.S_ISFIFO(mode) and sys.platform != "win32":  # whose loop waits for sockets alone
            return number
    return None


def shown_state(each: tenure.SemaphoreDescription) -> str:
    """Return a state in one line."""
    waiting = f", {each.waiting} waiting" if each.waiting else ""
    data = f'  data "{shown_data(each.data)}"' if each.data else ""
    if not each.owners:
        free = "free" if each.ephemeral else f"{held(each)} held"
        return f"{safe(each.name)}  {free}{waiting}{data}"
    what = "held" if kind(each) == "mutex" else f"{held(each)} held"
    owners = "; ".join(map(_owner, each.owners[:OWNERS]))
    more = f" and {len(each.owners) - OWNERS} more" if len(each.owners) > OWNERS else ""
    return f"{safe(each.name)}  {what} by {owners}{more}{waiting}{data}"


def _owner(owner: tenure.RequestDescription) -> str:
    several = "" if count(owner) in {"1", "all"} else f", x{count(owner)}"
    data = f' "{shown_data(owner.data)}"' if owner.data else ""
    return f"{describe_program(owner)}{several} (token {owner.order_id}){data}"


def state_json(each: tenure.SemaphoreDescription, node: str) -> dict[str, Any]:
    """Return a state in JSON: as `tenure describe --json`, and whether the semaphore exists."""
    there = not each.ephemeral or bool(each.owners) or bool(each.waiting)
    described = semaphore_json(each)
    if not there:
        described["kind"] = None
    del described["waiters"]  # waiters are not watched
    return {"time": time.time(), "node": node, "exists": there, **described}
