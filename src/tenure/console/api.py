"""JSON API under ``/api/v1``, described by ``/api/v1/openapi.json``.

It has what the pages show, with the field names of ``tenure describe --json``. Rules:

* A program sends its token as ``Authorization: Bearer TOKEN``. A browser that has signed in may
  read; what changes the store needs the token, or a connection that itself shows the visitor.
* Lists come in pages: ``following`` is the ``after`` of the next page, and null at the end.
* Data of more than `LONGEST_DATA` bytes is cut; ``data_bytes`` is its real length.
* An error is ``{"error": {"kind": ..., "message": ...}}``. Its kind is the name of the exception.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tenure import shown
from tenure.console import reading
from tenure.console.openapi import description
from tenure.console.record import Span, StoreEvent
from tenure.console.service import Console, host_of, read_body, status_of
from tenure.console.views import MOST_TASKS, PageRequest, chosen_node, kind_of, waits_of
from tenure.console.waits import NodeWaits, WaitParty
from tenure.core import refusals
from tenure.core.deadlocks import shows_waits, unsupported
from tenure.core.rules import check_name
from tenure.errors import InvalidArgument, TenureError
from tenure.model import RequestDescription, SemaphoreDescription
from tenure.shown import node_json, session_json

PREFIX = "/api/v1"
LONGEST_DATA = 4096
EVENTS = 200

Json = dict[str, Any]
Read = Callable[[PageRequest], Awaitable[Json]]


def error_response(
    status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error."""
    return JSONResponse({"error": {"kind": kind, "message": message}}, status, headers)


# Values


def semaphore_json(each: SemaphoreDescription) -> Json:
    """Return a semaphore without its requests, and with at most `LONGEST_DATA` bytes of data."""
    return shown.semaphore_json(each, kind_of(each), LONGEST_DATA)


def request_json(each: RequestDescription) -> Json:
    """Return a request with at most `LONGEST_DATA` bytes of data."""
    return shown.request_json(each, LONGEST_DATA)


def event_json(each: StoreEvent, wall: float) -> Json:
    """Return an event; `wall` is the time of day at time 0 of the record."""
    return {
        "number": each.number,
        "time": wall + each.at,
        "what": each.what,
        "node": each.node,
        "name": each.name or None,
        "program": each.label or None,
        "order_id": each.order_id,
        "lasted": each.lasted,
        "detail": each.detail or None,
    }


def span_json(each: Span, wall: float) -> Json:
    """Return a request of a timeline."""

    def time(at: float | None) -> float | None:
        return None if at is None else wall + at

    return {
        "order_id": each.order_id,
        "session_id": each.session_id,
        "program": each.label,
        "count": each.count,
        "joined": time(each.joined),
        "granted": time(each.granted),
        "ended": time(each.ended),
    }


def _party_json(each: WaitParty, waits: NodeWaits) -> Json:
    return {
        "session_id": each.session_id,
        "session_description": each.session_description,
        "pid": each.pid,
        "host": each.host,
        "program": each.program,
        "attached": None if each.session is None else each.session.attached,
        "silent_for": None if each.session is None else each.session.silent_for,
        "remaining": each.remaining,
        "since": None if each.began is None else max(0.0, waits.read_at - each.began),
        "leases": [{"name": name, "order_id": at} for name, at in each.leases],
    }


def task_json(each: WaitParty, waits: NodeWaits) -> Json:
    """Return a task that waits."""
    task = each.task
    assert task is not None
    parties = waits.parties
    return {
        "name": task.name,
        "order_id": task.order_id,
        "task": task.task,
        "timeout": task.timeout,
        "raises": task.raises,
        "left_out": task.left_out,
        "deadlock": each.deadlock or None,
        "awaited": [
            {
                "session_id": other.session_id,
                "order_id": None if other.task is None else other.task.order_id,
            }
            for other in (parties[key] for key in each.awaited)
        ],
        **_party_json(each, waits),
    }


def waits_json(waits: NodeWaits, wall: float) -> Json:
    """Return the waits of a node; `wall` is the time of day at time 0 of the record."""
    return {
        "node": waits.node,
        "time": wall + waits.read_at,
        "complete": waits.complete,
        "tasks": [task_json(each, waits) for each in waits.tasks[:MOST_TASKS]],
        "holders": [_party_json(each, waits) for each in waits.holders[:MOST_TASKS]],
        "deadlocks": len(waits.deadlocks),
        "tasks_left_out": max(0, len(waits.tasks) - MOST_TASKS),
        "holders_left_out": max(0, len(waits.holders) - MOST_TASKS),
    }


def _page(name: str, items: list[Json], page: reading.Page[Any, Any]) -> Json:
    return {name: items, "following": page.following}


# Reads


async def get_store(request: PageRequest) -> Json:
    """Return facts of the store, and of the reader."""
    engine, observer = request.visitor.engine, request.console.observer
    totals = observer.record.totals(request.allowed)
    trouble = observer.trouble or engine.trouble()
    return {
        "url": engine.url,
        "trouble": None if trouble is None else str(trouble),
        "visitor": request.visitor.name,
        "semaphores": totals.semaphores,
        "held": totals.held,
        "waiting": totals.waiting,
        "complete": observer.record.rounds > 0 and not observer.record.full,
        "round_seconds": observer.round_took,
    }


async def get_nodes(request: PageRequest) -> Json:
    """Return the next nodes."""
    page = await reading.describe_nodes(
        request.visitor.engine, after=request.text("after"), most=request.page_size()
    )
    return _page("nodes", [node_json(each, each.semaphores) for each in page.items], page)


async def get_semaphores(request: PageRequest) -> Json:
    """Return the next semaphores of a node."""
    node = await chosen_node(request)
    async with request.turn():
        page = await reading.semaphores(
            request.visitor.engine,
            node,
            search=request.text("search"),
            after=request.text("after"),
            most=request.page_size(),
        )
    found = [semaphore_json(each) for each in page.items]
    return {"node": node, **_page("semaphores", found, page)}


async def get_semaphore(request: PageRequest) -> Json:
    """Return one semaphore with its first owners and waiters."""
    node, name = await chosen_node(request), request.text("name")
    engine, size = request.visitor.engine, request.page_size()
    described = await reading.describe_semaphore(engine, node, name)
    owners = await reading.requests(engine, node, name, waiters=False, most=size)
    waiters = await reading.requests(engine, node, name, waiters=True, most=size)
    return {
        "node": node,
        **semaphore_json(described),
        "owners": [request_json(each) for each in owners.items],
        "owners_following": owners.following,
        "waiters": [request_json(each) for each in waiters.items],
        "waiters_following": waiters.following,
    }


async def get_requests(request: PageRequest) -> Json:
    """Return the next owners or waiters of a semaphore."""
    node, name, role = await chosen_node(request), request.text("name"), request.text("role")
    if role not in {"owners", "waiters"}:
        raise InvalidArgument(f"role is owners or waiters, not {role[:40]!r}")
    page = await reading.requests(
        request.visitor.engine,
        node,
        name,
        waiters=role == "waiters",
        after=request.number("after"),
        most=request.page_size(),
    )
    found = [request_json(each) for each in page.items]
    return {"node": node, "name": name, "role": role, **_page("requests", found, page)}


async def get_sessions(request: PageRequest) -> Json:
    """Return the next sessions of a node."""
    node = await chosen_node(request)
    async with request.turn():
        page = await reading.sessions(
            request.visitor.engine,
            node,
            search=request.text("search"),
            after=request.number("after"),
            most=request.page_size(),
        )
    return {"node": node, **_page("sessions", [session_json(each) for each in page.items], page)}


async def get_events(request: PageRequest) -> Json:
    """Return the latest changes that the observer has seen, the newest first."""
    found = request.console.observer.record.events(
        request.allowed,
        most=EVENTS,
        after=request.number("after"),
        node=request.text("node"),
        name=request.text("name"),
    )
    wall = _wall(request)
    return {"events": [event_json(each, wall) for each in found]}


async def get_timeline(request: PageRequest) -> Json:
    """Return the requests of a semaphore in the last minutes."""
    node, name = await chosen_node(request), request.text("name")
    request.console.observer.attend(node, name)
    await reading.describe_node(request.visitor.engine, node)  # raises if it may not be seen
    seen = request.console.observer.record.find(node, name)
    wall = _wall(request)
    spans = () if seen is None else seen.spans()
    return {"node": node, "name": name, "requests": [span_json(each, wall) for each in spans]}


async def get_waits(request: PageRequest) -> Json:
    """Return the tasks of a node that wait, as the observer has read them."""
    node = await chosen_node(request)
    _check_shown(request, node)
    found = await waits_of(request, node)
    return waits_json(
        found or NodeWaits(node, request.console.clock.now(), complete=False), _wall(request)
    )


async def get_why(request: PageRequest) -> Json:
    """Return the reason why the waiters of a semaphore wait, read now."""
    node, name = await chosen_node(request), request.text("name")
    check_name(name, node)
    _check_shown(request, node)
    found = await reading.read_waits(request.visitor.engine, node, first=[name], whole=False)
    if name not in found.queues:
        raise refusals.semaphore_not_found(node, name)
    queue, size = found.queues[name], request.page_size()
    return {
        "name": name,
        "owners": [request_json(each) for each in queue.owners[:size]],
        "waiters": [request_json(each) for each in queue.waiters[:size]],
        **waits_json(found, _wall(request)),
    }


async def get_deadlocks(request: PageRequest) -> Json:
    """Return the deadlocks, as the observer has read them."""
    given, allowed = request.text("node"), request.allowed
    _check_shown(request, given)
    seen = request.console.observer.waits
    if given:
        found = await waits_of(request, given)
        every = [] if found is None else [found]
    else:
        every = [waits for node, waits in seen.items() if allowed(node)]
    return {
        "deadlocks": [
            {
                "node": waits.node,
                "tasks": [task_json(each, waits) for each in members[:MOST_TASKS]],
                "tasks_left_out": max(0, len(members) - MOST_TASKS),
            }
            for waits in every
            for members in waits.deadlocks
        ],
        "complete": bool(every) and all(waits.complete for waits in every),
    }


def _check_shown(request: PageRequest, node: str) -> None:
    engine = request.visitor.engine
    if not shows_waits(engine.capabilities):
        raise unsupported(engine.url, node)


def _wall(request: PageRequest) -> float:
    """Return the time of day at time 0 of the record."""
    clock = request.console.clock
    return clock.wall() - clock.now()


READS: dict[str, Read] = {
    "/store": get_store,
    "/nodes": get_nodes,
    "/semaphores": get_semaphores,
    "/semaphore": get_semaphore,
    "/requests": get_requests,
    "/sessions": get_sessions,
    "/events": get_events,
    "/timeline": get_timeline,
    "/waits": get_waits,
    "/why": get_why,
    "/deadlocks": get_deadlocks,
}


def routes(console: Console) -> list[Route]:
    """Return the routes of the API."""

    def answered(work: Callable[[Request], Awaitable[Json]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                return JSONResponse(await work(request))
            except TenureError as error:
                return error_response(status_of(error), type(error).__name__, str(error))

        return endpoint

    def reads(read: Read) -> Callable[[Request], Any]:
        async def work(request: Request) -> Json:
            visit = await console.api_visit(request)
            return await read(PageRequest(console, visit.visitor, request.query_params))

        return answered(work)

    async def act(request: Request) -> Json:
        visit = await console.api_visit(request)
        if visit.secret:
            raise HTTPException(403, "the API changes nothing for a cookie; send a bearer token")
        sent = PageRequest(console, visit.visitor, await _sent(request))
        host, node = host_of(request), sent.text("node")
        if request.url.path.endswith("/end"):
            number = sent.number("session_id")
            found = await console.end_session(visit.visitor, host, node, number)
            return {"ended": found, "node": node, "session_id": number}
        name, order_id = sent.text("name"), sent.number("order_id")
        found = await console.evict(visit.visitor, host, node, name, order_id)
        return {"evicted": found, "node": node, "name": name, "order_id": order_id}

    async def describe(request: Request) -> Json:
        return description(request.scope.get("root_path", "") + PREFIX)

    found = [Route(PREFIX + path, reads(read)) for path, read in READS.items()]
    found.append(Route(f"{PREFIX}/sessions/end", answered(act), methods=["POST"]))
    found.append(Route(f"{PREFIX}/requests/evict", answered(act), methods=["POST"]))
    found.append(Route(f"{PREFIX}/openapi.json", answered(describe)))
    return found


async def _sent(request: Request) -> dict[str, str]:
    """Return the fields of a JSON object as texts.

    Raises:
        HTTPException: 415: the body is no JSON; 400: it is damaged, or no object of texts and
            numbers.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body is application/json")
    body = await read_body(request)
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the body is not valid JSON") from error
    if not isinstance(sent, dict) or not all(type(each) in {str, int} for each in sent.values()):
        raise HTTPException(400, "the body is an object of texts and whole numbers")
    return {name: str(value) for name, value in sent.items()}
