"""`tenure ls` and `tenure describe`: holders and waiters, with their times.

`tenure watch`: a line for each state of a semaphore, a mutex or an election.

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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

import tenure
from tenure import shown
from tenure._client.watch import Watch
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import (
    complete,
    json_option,
    name_argument,
    node_option,
    run_async,
    url_option,
    watch_options,
)
from tenure.cli.output import (
    Column,
    duration,
    is_terminal,
    print_json,
    print_json_line,
    safe,
    say,
    shown_data,
    table,
)
from tenure.cli.store import NoStoreYet, open_store, shown_url
from tenure.core.rules import EXACT
from tenure.shown import kind, request_json

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


Semaphore = tenure.SemaphoreDescription
Request = tenure.RequestDescription
Session = tenure.SessionDescription

NAME = Column("Name", style="bold", text=True, keep=True)
KIND = Column("Kind")
HELD = Column("Held", style="green", keep=True)
WAITING = Column("Waiting", style="yellow", right=True, keep=True)
SINCE = Column("Since", right=True, keep=True)
OWNER = Column("Owner", text=True)
HOST = Column("Host", text=True)
DATA = Column("Data", style="cyan", text=True)


@click.command()
@click.argument("node", required=False, metavar="[NODE]", shell_complete=complete("nodes"))
@json_option
@url_option
def ls(node: str | None, *, as_json: bool) -> None:
    """List semaphores with their holders and waiters.

    Lists the nodes with their semaphores, mutexes and elections, or those of NODE.
    """
    try:
        nodes = run_async(_read(node))
    except NoStoreYet:
        nodes = []
    if as_json:
        print_json({"nodes": [node_json(described, there) for described, there in nodes]})
    elif is_terminal():
        say(f"store: {safe(shown_url())}", style="dim")
        for at, (described, there) in enumerate(nodes):
            if at:
                say()
            _show_node(described, there)
    else:
        rows = [[described.path, *_row(each)] for described, there in nodes for each in there]
        if rows:
            table([Column("Node"), NAME, KIND, HELD, WAITING, SINCE, OWNER, HOST, DATA], rows)
    if not as_json and not any(there for _, there in nodes):
        _print_empty([described.path for described, _ in nodes], node)


async def _read(
    only: str | None,
) -> list[tuple[tenure.NodeDescription, Sequence[Semaphore]]]:
    async with open_store() as client:
        paths = await client.list_nodes() if only is None else [only]
        known = client.capabilities.owners
        return [
            (
                await client.describe_node(path),
                await client.list_semaphores(path, owners=known, waiters=False),
            )
            for path in paths
        ]


def _show_node(node: tenure.NodeDescription, there: Sequence[Semaphore]) -> None:
    say(f"{node.path}{_sessions(node.sessions)}", style="bold blue")
    if there:
        columns = [NAME, KIND, HELD, WAITING, SINCE, OWNER, HOST, DATA]
        table(columns, [_row(each) for each in there])


def _sessions(count: int | None) -> str:
    if count is None:
        return ""
    return "  (1 session)" if count == 1 else f"  ({count} sessions)"


def _print_empty(paths: Sequence[str], only: str | None) -> None:
    where = f"on {only}" if only is not None else f"({', '.join(paths) or 'nothing yet'})"
    say(f"nothing is held, awaited or stored {where} in {safe(shown_url())}")
    say("try: tenure run --lock demo -- sleep 60 &  then: tenure ls")


def _row(each: Semaphore) -> list[str]:
    first = each.owners[0] if each.owners else None
    more = f" and {len(each.owners) - 1} more" if len(each.owners) > 1 else ""
    data = first.data if first and first.data else each.data
    return [
        safe(each.name),
        kind(each),
        held(each),
        "" if each.waiting is None else str(each.waiting or "-"),
        duration(first.since) if first else "",
        owner(first) + more if first else "",
        safe(first.host or "") if first else "",
        shown_data(data, 40),
    ]


@click.command()
@name_argument
@node_option
@json_option
@url_option
def describe(name: str, node: str, *, as_json: bool) -> None:
    """Show the holders and waiters of NAME.

    NAME is a mutex, a semaphore or an election; waiters are shown in the order of the queue.
    """
    described = run_async(_describe(name, node))
    if as_json:
        print_json({"node": node} | semaphore_json(described))
    else:
        _show_semaphore(described, node)


async def _describe(name: str, node: str) -> Semaphore:
    async with open_store() as client:
        return await client.describe_semaphore(name, node)


def _show_semaphore(each: Semaphore, node: str) -> None:
    say(f"{safe(each.name)}  {kind(each)} on {node}", style="bold blue")
    waiting = len(each.waiters)
    say(f"{held(each)}, {waiting or 'none'} waiting")
    if each.data:
        say(f"data: {shown_data(each.data, 200)}")
    if each.owners:
        say()
        _show_requests("Owners", each.owners, since="Since", style="green")
    if each.waiters:
        say()
        _show_requests("Waiters, in order", each.waiters, since="Waits for", style="yellow")


def _show_requests(title: str, requests: Sequence[Request], *, since: str, style: str) -> None:
    say(title, style="bold")
    columns = [
        Column("Token", style=style, right=True, keep=True),
        Column("Count", right=True),
        Column(since, right=True, keep=True),
        Column("Process", right=True, keep=True),
        HOST,
        Column("Program", text=True),
        DATA,
        Column("Description", text=True),
        Column("Timeout", right=True),
        Column("Session", right=True),
    ]
    rows = [
        [
            str(each.order_id),
            count(each),
            duration(each.since),
            "" if each.pid is None else str(each.pid),
            safe(each.host or ""),
            program(each),
            shown_data(each.data),
            remark(each),
            duration(each.timeout),
            str(each.session_id),
        ]
        for each in requests
    ]
    known = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    table([columns[at] for at in known], [[row[at] for at in known] for row in rows])


def no_request(each: Semaphore, node: str, order_id: int) -> Mistake:
    """Return the error for a token that no request of the semaphore has."""
    there = ", ".join(str(request.order_id) for request in (*each.owners, *each.waiters)[:5])
    return Mistake(
        Status.REFUSED,
        f"{each.name!r} on {node} has no owner or waiter {order_id}; "
        + (f"there are: {there}" if there else "it has no holder and no waiter"),
    )


# A semaphore in words


def held(each: Semaphore) -> str:
    """Return in words how much of the semaphore is held."""
    if kind(each) == "mutex":
        return "held" if each.held else "free"
    if each.limit > EXACT:
        return f"{each.held}, no limit"
    return f"{each.held} of {each.limit}"


def count(request: Request) -> str:
    """Return the number of tokens of a request, or "all"."""
    return "all" if request.count > EXACT else str(request.count)


def describe_program(request: Request) -> str:
    """Return the program of a request in a sentence: ``backup.py, pid 4242 on db-1 (nightly)``."""
    name = ", ".join(filter(None, (program(request), _process(request))))
    if request.host:
        name += f" on {safe(request.host)}"
    return f"{name} ({remark(request)})" if remark(request) else name


def owner(request: Request) -> str:
    """Return the program of a request in a table: ``pid 4242 backup.py (nightly)``.

    The process comes first, because the end may be cut off.
    """
    name = f"{_process(request)} {program(request)}".rstrip()
    return f"{name} ({remark(request)})" if remark(request) else name


def _process(request: Request) -> str:
    return f"session {request.session_id}" if request.pid is None else f"pid {request.pid}"


def program(each: Request | Session | tenure.LastRun) -> str:
    """Return a program's name, or a description that contains it (``tenure run backup.sh``)."""
    text = _description(each)
    return safe(text if text.startswith(each.program or "") else each.program or "")


def remark(each: Request | Session) -> str:
    """Return the description, unless `program` already shows it."""
    text = _description(each)
    return "" if text.startswith(each.program or "") else safe(text)


def _description(each: Request | Session | tenure.LastRun) -> str:
    if isinstance(each, Request):
        return each.session_description or ""
    return each.description


# The same for scripts


def semaphore_json(each: Semaphore) -> dict[str, Any]:
    """Return a semaphore in JSON, with its owners and waiters."""
    return {
        **shown.semaphore_json(each, "semaphore" if not each.ephemeral else kind(each)),
        "owners": [request_json(request) for request in each.owners],
        "waiters": [request_json(waiter) for waiter in each.waiters],
    }


def node_json(node: tenure.NodeDescription, there: Sequence[Semaphore]) -> dict[str, Any]:
    """Return a node in JSON, with its semaphores."""
    return shown.node_json(node, [semaphore_json(each) for each in there])
