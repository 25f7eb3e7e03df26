"""`tenure why` and `tenure deadlocks`: holders and what they wait for, down to the root.

The chain is a tree of lines. A line is a holder, with its session. Below a holder whose task is
known to wait stands what it waits for, with the holders of that, and so on. What was shown already
is shown once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

import tenure
from tenure.cli.look import count, describe_program, held, no_request, semaphore_json
from tenure.cli.mistakes import Status
from tenure.cli.options import (
    a_count,
    complete,
    json_option,
    name_argument,
    node_option,
    run_async,
    url_option,
)
from tenure.cli.output import duration, print_json, safe, say
from tenure.cli.store import NoStoreYet, open_store
from tenure.shown import kind, request_json, session_json

MOST = 10
"""Holders and waiters of one semaphore that are shown; with ``--json`` all are shown."""

Task = tenure.BlockedTask
Graph = tenure.WaitGraph


@click.command()
@name_argument
@click.option(
    "--token",
    "order_id",
    metavar="N",
    type=a_count,
    help="One waiter or holder, by its fencing token.",
)
@node_option
@json_option
@url_option
def why(name: str, order_id: int | None, node: str, *, as_json: bool) -> None:
    """Show why the waiters of NAME wait.

    NAME is a mutex, a semaphore or an election. Each holder is shown with its session: attached or
    not, how long it has been silent, and when it expires unless it is renewed. Below it stands what
    its task waits for in turn, with the holders of that.

    With --token, one waiter is explained, with its place and the waiters ahead of it, or one
    holder, with what its task waits for. 'tenure describe NAME' shows the tokens.

    A task is known to wait if it is inside the block of a lease, or waits for several tokens, and
    has waited for about a second.

    Exits with 73 when the name or the token does not exist.
    """
    graph = run_async(_waits(name, node))
    if order_id is not None and graph.chain(order_id) is None:
        raise no_request(graph.semaphores[0], node, order_id)
    if as_json:
        print_json(graph_json(graph) if order_id is None else chain_json(graph, order_id))
    else:
        for line, style in lines_of(graph, order_id):
            say(line, style=style)


async def _waits(name: str, node: str) -> Graph:
    async with open_store() as client:
        return await client.waits(name, node)


@click.command()
@click.argument("node", required=False, metavar="[NODE]", shell_complete=complete("nodes"))
@json_option
@url_option
def deadlocks(node: str | None, *, as_json: bool) -> int:
    """List deadlocks: tasks that wait for each other.

    Of all nodes, or of NODE. None of the tasks of a deadlock can be granted what it waits for, even
    if all other programs release everything. A task is known to wait if it is inside the block of a
    lease, and has waited for about a second.

    Exits with 0 when there is no deadlock, else with 72.
    """
    try:
        found = run_async(_deadlocks(node))
    except NoStoreYet:
        found = {}
    status = Status.DEADLOCK if any(found.values()) else Status.DONE
    if as_json:
        print_json(
            {
                "deadlocks": [
                    {"node": path, "tasks": [task_json(task) for task in tasks]}
                    for path, several in found.items()
                    for tasks in several
                ]
            }
        )
        return status
    for path, several in found.items():
        for tasks in several:
            say(f"deadlock on {path}", style="bold red")
            for task in tasks:
                say(f"  {shown_task(task, tasks)}")
    if status is Status.DONE:
        say(f"no deadlock{'' if node is None else f' on {node}'}")
    return status


async def _deadlocks(only: str | None) -> dict[str, Sequence[tuple[Task, ...]]]:
    async with open_store() as client:
        paths = await client.list_nodes() if only is None else [only]
        return {path: await client.deadlocks(path) for path in paths}


def shown_task(task: Task, tasks: Sequence[Task]) -> str:
    """Return a task of a deadlock in one line."""
    awaited = {each.name for each in tasks}
    inside = dict.fromkeys(safe(name) for name, _ in task.leases if name in awaited)
    until = " until a timeout" if task.timeout else ""
    within = f"is inside {' and '.join(inside)} and " if inside else ""
    return f"{_program(task)} {within}waits for {safe(task.name)} (token {task.order_id}){until}"


def _program(task: Task) -> str:
    request = tenure.RequestDescription(
        task.session_id,
        task.order_id,
        1,
        b"",
        session_description=task.session_description,
        host=task.host,
        pid=task.pid,
        program=task.program,
    )
    name = describe_program(request).removeprefix(", ")
    return f"{name}, task {safe(task.task)}," if task.task else name


# The tree


def lines_of(graph: Graph, order_id: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a graph, each with its style.

    Args:
        graph: the graph.
        order_id: the only request of the name to explain; ``None`` for all waiters.
    """
    part = graph if order_id is None else graph.chain(order_id)
    whole, waiting = graph.semaphores[0], len(graph.waiters)
    queue = f"{held(whole)}, {waiting or 'none'} waiting"
    yield f"{safe(whole.name)}  {kind(whole)} on {graph.node}, {queue}", "bold blue"
    if part is None:
        yield f"request {order_id} has left the queue", ""
        return
    first, waiters, seen = part.semaphores[0], part.waiters, {whole.name}
    if order_id is not None and waiters:
        *ahead, request = waiters
        place = f"place {len(waiters)} of {waiting}"
        yield f"waits{_since(request)}, {place}: {_request(request)}", "bold yellow"
        yield f"  {_session(request, graph.session(request.session_id))}", ""
        if ahead:
            yield f"ahead of it, {len(ahead)} waiting:", ""
        waiters = tuple(ahead)
    for number, each in enumerate(waiters[:MOST], start=1):
        yield f"{number}. waits{_since(each)}: {_request(each)}", "yellow"
        task = graph.task(whole.name, each.order_id)
        if task is not None and task.name != whole.name:  # a ticket
            yield from _awaited(graph, task, 1, seen)
    if len(waiters) > MOST:
        yield f"and {len(waiters) - MOST} more", "yellow"
    yield from _holders(graph, first, 0, seen)
    for tasks in part.deadlocks:
        yield "deadlock: none of these tasks can be granted what it waits for", "bold red"
        for task in tasks:
            yield f"  {shown_task(task, tasks)}", "red"
    if not graph.complete:
        yield "not all was read: the tasks wait for too many semaphores", "dim"


def _holders(
    graph: Graph, semaphore: tenure.SemaphoreDescription, depth: int, seen: set[str]
) -> Iterator[tuple[str, str]]:
    margin = "  " * depth
    if not semaphore.owners:
        yield f"{margin}it has no holder", ""
    for each in semaphore.owners[:MOST]:
        yield f"{margin}held{_since(each)} by {_request(each)}", "green"
        session = graph.session(each.session_id)
        yield f"{margin}  {_session(each, session)}", ""
        task = graph.task(semaphore.name, each.order_id)
        if task is None:
            yield f"{margin}  no wait of it is known", ""
            continue
        yield from _awaited(graph, task, depth + 1, seen)
    if len(semaphore.owners) > MOST:
        yield f"{margin}and {len(semaphore.owners) - MOST} more holders", ""


def _awaited(graph: Graph, task: Task, depth: int, seen: set[str]) -> Iterator[tuple[str, str]]:
    margin = "  " * depth
    semaphore = graph.semaphore(task.name)
    known = () if semaphore is None else semaphore.waiters
    request = next((each for each in known if each.order_id == task.order_id), None)
    which = f"task {safe(task.task)}" if task.task else "its task"
    until = ", until a timeout" if task.timeout else ""
    since = "" if request is None else _since(request)
    again = task.name in seen
    above = ", which is shown above" if again else ""
    yield f"{margin}{which} waits{since} for {safe(task.name)}{until}{above}", "yellow"
    if not again and semaphore is not None:
        seen.add(task.name)
        yield from _holders(graph, semaphore, depth + 1, seen)


def _since(request: tenure.RequestDescription) -> str:
    return "" if request.since is None else f" for {duration(request.since)}"


def _request(request: tenure.RequestDescription) -> str:
    several = "" if count(request) in {"1", "all"} else f", x{count(request)}"
    return f"{describe_program(request).removeprefix(', ')}{several} (token {request.order_id})"


def _session(request: tenure.RequestDescription, session: tenure.SessionDescription | None) -> str:
    """Return in words whether the session of a request lives."""
    attached = None if session is None else session.attached
    silent = None if session is None else session.silent_for
    facts = [
        {True: "attached", False: "not attached", None: ""}[attached],
        "" if silent is None else f"silent for {duration(silent)}",
        ""
        if request.remaining is None
        else f"expires in {duration(request.remaining)} unless it is renewed",
    ]
    known = ", ".join(filter(None, facts))
    return f"session {request.session_id}{': ' if known else ''}{known}"


# The same for scripts


def task_json(task: Task) -> dict[str, Any]:
    """Return a blocked task in JSON."""
    described = dataclasses.asdict(task)
    described["leases"] = [{"name": name, "order_id": at} for name, at in task.leases]
    return described


def graph_json(graph: Graph) -> dict[str, Any]:
    """Return a graph of waits in JSON; its first semaphore is that of the name."""
    return {
        "node": graph.node,
        "name": graph.name,
        "semaphores": [semaphore_json(each) for each in graph.semaphores],
        "tasks": [task_json(each) for each in graph.tasks],
        "sessions": [session_json(each) for each in graph.sessions],
        "roots": [request_json(each) for each in graph.roots],
        "deadlocks": [[task_json(task) for task in tasks] for tasks in graph.deadlocks],
        "complete": graph.complete,
    }


def chain_json(graph: Graph, order_id: int) -> dict[str, Any]:
    """Return in JSON the part of a graph that explains one request of the name."""
    chain = graph.chain(order_id)
    assert chain is not None
    place = len(chain.waiters) or None
    return {**graph_json(chain), "order_id": order_id, "place": place}
