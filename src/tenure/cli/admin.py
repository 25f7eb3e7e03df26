"""`tenure session` and `tenure evict`: list and end sessions, and evict requests.

The commands report what they have ended, so that a wrong number is noticed at once.
"""

from __future__ import annotations

import contextlib

import click

import tenure
from tenure.cli.app import CommandGroup
from tenure.cli.look import count, describe_program, no_request, program, remark
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.nodes import SESSION_COLUMNS, session_row
from tenure.cli.options import (
    a_count,
    complete,
    json_option,
    name_argument,
    node_option,
    run_async,
    url_option,
)
from tenure.cli.output import Column, duration, print_json, safe, say, shown_data, table
from tenure.cli.store import NoStoreYet, open_store
from tenure.shown import request_json, session_json

LARGEST = 2**63 - 1
"""The greatest number that any store gives to a session or a request."""


@click.group(cls=CommandGroup)
def session() -> None:
    """List and end sessions.

    A session is one program's connection to the store. Its leases and its places in queues end with
    it.
    """


@session.command("ls")
@click.argument("node", required=False, metavar="[NODE]", shell_complete=complete("nodes"))
@json_option
@url_option
def list_sessions(node: str | None, *, as_json: bool) -> None:
    """List the sessions, of every node or of NODE.

    Exits with 73 when the node does not exist.
    """

    async def work() -> list[tenure.SessionDescription]:
        async with open_store() as client:
            nodes = await client.list_nodes() if node is None else [node]
            return [each for path in nodes for each in await client.list_sessions(path)]

    try:
        sessions = run_async(work())
    except NoStoreYet:
        sessions = []
    if as_json:
        print_json({"sessions": [session_json(each) for each in sessions]})
    elif sessions:
        columns = [Column("Node", text=True, keep=True), *SESSION_COLUMNS]
        table(columns, [[each.node, *session_row(each)] for each in sessions])
    else:
        say("no sessions")


@session.command("end")
@click.argument("node", metavar="NODE", shell_complete=complete("nodes"))
@click.argument("number", metavar="ID", type=a_count)
@json_option
@url_option
def end_session(node: str, number: int, *, as_json: bool) -> None:
    """End the session ID of NODE before it expires.

    Its leases are released at once, and its program is notified. Until then the program still
    considers them held. 'tenure session ls' shows the ids.

    Exits with 73 when the session does not exist.
    """

    async def work() -> tenure.SessionDescription | None:
        async with open_store() as client:
            sessions = {each.id: each for each in await client.list_sessions(node)}
            if number <= LARGEST and await client.end_session(node, number):
                return sessions.get(number)
            others = "" if sessions else await _busy_nodes(client)
            there = ", ".join(map(str, sorted(sessions)[:10])) or f"none{others}"
            raise Mistake(
                Status.REFUSED, f"there is no session {number} on {node}; there are: {there}"
            )

    ended = run_async(work())
    if as_json:
        described = None if ended is None else session_json(ended)
        print_json({"ended": True, "node": node, "session_id": number, "session": described})
        return
    about = ""
    if ended is not None:
        process = "" if ended.pid is None else f"pid {ended.pid}"
        about = ", ".join(filter(None, (program(ended), process)))
        about += f" on {safe(ended.host)}" if ended.host else ""
        about += f" ({remark(ended)})" if remark(ended) else ""
    say(f"ended the session {number} on {node}{about and ': '}{about}")


async def _busy_nodes(client: tenure.Client) -> str:
    """Name the nodes that have sessions, as a hint when the wrong node was given."""
    busy = []
    for path in await client.list_nodes():
        with contextlib.suppress(tenure.NodeNotFound):  # dropped just now
            if (await client.describe_node(path)).sessions:
                busy.append(path)
    return f" (but on {', '.join(busy)})" if busy else ""


@click.command()
@name_argument
@click.argument("order_id", metavar="TOKEN", type=a_count)
@node_option
@json_option
@url_option
def evict(name: str, order_id: int, node: str, *, as_json: bool) -> None:
    """Take one owner or waiter away from NAME.

    TOKEN is its fencing token, as 'tenure describe NAME' shows it. An evicted owner loses its lease
    at once, and its program is notified. Until then the program still considers it held. Its
    session keeps its other leases.

    Exits with 73 when the request does not exist.
    """

    async def work() -> tenure.RequestDescription | None:
        async with open_store() as client:
            described = await client.describe_semaphore(name, node)
            requests = {each.order_id: each for each in (*described.owners, *described.waiters)}
            if order_id <= LARGEST and await client.evict(node, name, order_id):
                return requests.get(order_id)
            raise no_request(described, node, order_id)

    gone = run_async(work())
    if as_json:
        request = None if gone is None else request_json(gone)
        print_json(
            {"evicted": True, "node": node, "name": name, "order_id": order_id, "request": request}
        )
        return
    say(f"evicted {order_id} from {safe(name)} on {node}{_owner_note(gone)}")


def _owner_note(gone: tenure.RequestDescription | None) -> str:
    if gone is None:
        return ""
    since = "" if gone.since is None else f", for {duration(gone.since)}"
    data = f", data {shown_data(gone.data)}" if gone.data else ""
    return f": {describe_program(gone)}, count {count(gone)}{since}{data}"
