"""Operations on a server session: one function for each message of its holder.

Each begins its operation within the call, so that the store gets the operations in order, and
answers at once if the engine does. `tenure.server.sessions.session` describes cancellation,
disconnects and the close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct

from tenure.core import rules
from tenure.engines.contract import Enqueued, Withdrawn
from tenure.errors import InvalidArgument, TenureError
from tenure.model import UNCHANGED, RequestDescription, SemaphoreDescription, SessionDescription
from tenure.server.limits import Count, LimitReached
from tenure.server.reads import SLICE, Reader, converted, without_server
from tenure.server.sessions.session import (
    HolderConnection,
    ServerRequest,
    ServerSession,
    error_of,
)
from tenure.wire.messages import (
    READ_PRICE,
    Acknowledge,
    Alter,
    Close,
    CreateSemaphore,
    DeleteSemaphore,
    DescribeSemaphore,
    Detach,
    Done,
    Enqueue,
    Renew,
    ResizeSemaphore,
    SemaphoreDescribed,
    Unwatch,
    UpdateSemaphore,
    Watch,
    WatchRefused,
    Withdraw,
)
from tenure.wire.values import RequestInfo, SemaphoreInfo, SessionInfo


def session_info(session: SessionDescription) -> SessionInfo:
    """Return the description of a session."""
    return SessionInfo.of(without_server(session))


def semaphore_info(semaphore: SemaphoreDescription) -> SemaphoreInfo:
    """Return the description of a semaphore, with the requested lists."""
    return SemaphoreInfo(
        semaphore.name,
        semaphore.data,
        semaphore.limit,
        semaphore.held,
        semaphore.ephemeral,
        list(map(request_info, semaphore.owners)),
        list(map(request_info, semaphore.waiters)),
        semaphore.waiting,
    )


async def described(reader: Reader, semaphore: SemaphoreDescription) -> SemaphoreInfo:
    """Return a semaphore's description for a message; a long queue takes several slices."""
    owners, waiters = semaphore.owners, semaphore.waiters
    if len(owners) + len(waiters) <= SLICE:
        return semaphore_info(semaphore)
    return SemaphoreInfo(
        semaphore.name,
        semaphore.data,
        semaphore.limit,
        semaphore.held,
        semaphore.ephemeral,
        await converted(reader, owners, request_info),
        await converted(reader, waiters, request_info),
        semaphore.waiting,
    )


def request_info(request: RequestDescription) -> RequestInfo:
    """Return the description of a request in a queue."""
    return RequestInfo.of(without_server(request))


def bytes_of(semaphore: SemaphoreDescription) -> int:
    """Estimate the bytes of a semaphore's description in a message."""
    requests = (*semaphore.owners, *semaphore.waiters)
    return 1200 + len(semaphore.data) + sum(map(bytes_of_request, requests))


def bytes_of_request(request: RequestDescription) -> int:
    return 100 + len(request.data) + len(request.session_description or "")


def check_size(semaphore: SemaphoreDescription, node: str, most: int) -> int:
    """Estimate the bytes of a description.

    Raises:
        LimitReached: they exceed the limit of a message.
    """
    size = bytes_of(semaphore)
    if size > most:
        raise LimitReached(
            f"the description of {semaphore.name!r} on {node} has about {size} bytes, and this "
            f"server's limit output_bytes allows {most}; request its owners or its waiters alone, "
            "or for neither",
            "output_bytes",
            node=node,
            name=semaphore.name,
        )
    return size


_Work: TypeAlias = Callable[[ServerSession, Any], Coroutine[Any, Any, Struct]]


def _check_data(session: ServerSession, data: bytes, name: str | None) -> None:
    most = session.context.limits.data_bytes
    if len(data) > most:
        raise LimitReached(
            f"this server takes at most {most} bytes of data (its limit data_bytes), not "
            f"{len(data)}; store it elsewhere and keep its address here",
            "data_bytes",
            node=session.node,
            name=name,
        )


def _check_count(session: ServerSession, limit: str, count: int, name: str) -> None:
    most = getattr(session.context.limits, limit)
    if count >= most:
        raise Count(limit, most, "this session").reached(node=session.node, name=name)


# --- requests ------------------------------------------------------------------------------


def _enqueue(session: ServerSession, message: Enqueue) -> None:
    rid, request_id, name = message.rid, message.request_id, message.name
    if not session.answers.is_new(rid, session.send):
        return
    requests = session.requests.queued
    try:
        _check_data(session, message.data, name)
        rules.check_timeout(message.timeout, session.node, name)
        if request_id in requests:
            raise InvalidArgument(
                f"request {request_id} of this session on {session.node} is in a queue already",
                node=session.node,
                name=name,
            )
        _check_count(session, "requests_per_session", len(requests), name)
        session.context.counts.semaphores.add_request(
            session.node, name, ephemeral=message.ephemeral, account=session.account
        )
    except TenureError as error:
        session.fail(rid, error)
        return
    requests[request_id] = request = ServerRequest(name, message.count, message.ephemeral)
    try:
        answer = session.store.enqueue(
            request_id,
            name,
            message.count,
            message.data,
            timeout=message.timeout,
            ephemeral=message.ephemeral,
        )
    except Exception as error:
        session.requests.drop(request_id, request)
        session.fail(rid, error)
        return
    if isinstance(answer, asyncio.Future):
        session.answers.unanswered.add(rid)
        assert session.connection is not None
        session.connection.count_pending()
        answer.add_done_callback(
            partial(_when_placed, session, session.connection, rid, request_id, request)
        )
    else:
        session.answer(rid, session.requests.place(rid, request_id, request, answer))


def _when_placed(
    session: ServerSession,
    connection: HolderConnection,
    rid: int,
    request_id: int,
    request: ServerRequest,
    answer: asyncio.Future[Enqueued],
) -> None:
    connection.uncount_pending()
    session.answers.unanswered.discard(rid)
    error = error_of(answer)
    if session.error is not None:
        return  # the client has been notified of its end
    if error is not None:
        session.requests.drop(request_id, request)
        session.fail(rid, error)
    else:
        session.answer(rid, session.requests.place(rid, request_id, request, answer.result()))


def _withdraw(session: ServerSession, message: Withdraw) -> None:
    rid, request_id = message.rid, message.request_id
    if not session.answers.is_new(rid, session.send):
        return
    request = session.requests.queued.get(request_id)
    if request is not None:
        session.requests.drop(request_id, request)
    elif session.requests.removals:
        session.requests.removals.pop(request_id, None)
    try:
        answer = session.store.withdraw(request_id)
    except Exception as error:
        session.fail(rid, error)
        return
    if isinstance(answer, asyncio.Future):
        _answer_later(session, rid, answer)
    else:
        session.answer(rid, _done(rid, answer))


def _alter(session: ServerSession, message: Alter) -> None:
    rid = message.rid
    if not session.answers.is_new(rid, session.send):
        return
    request = session.requests.queued.get(message.request_id)
    try:
        if message.data is not None:
            _check_data(session, message.data, None if request is None else request.name)
        if message.new_timeout:
            rules.check_timeout(message.timeout, session.node)
        answer = session.store.alter(
            message.request_id,
            count=message.count,
            data=message.data,
            timeout=message.timeout if message.new_timeout else UNCHANGED,
        )
    except Exception as error:
        session.fail(rid, error)
        return
    if request is not None and message.count is not None:
        request.count = message.count
    if answer is None:
        session.answer(rid, Done(rid))
    else:
        _answer_later(session, rid, answer)


def _answer_later(session: ServerSession, rid: int, answer: asyncio.Future[Any]) -> None:
    assert session.connection is not None
    session.answers.unanswered.add(rid)
    session.connection.count_pending()
    answer.add_done_callback(partial(_when_done, session, session.connection, rid))


def _when_done(
    session: ServerSession, connection: HolderConnection, rid: int, answer: asyncio.Future[Any]
) -> None:
    connection.uncount_pending()
    session.answers.unanswered.discard(rid)
    error = error_of(answer)
    if session.error is not None:
        return  # the client has been notified of its end
    if error is not None:
        session.fail(rid, error)
    else:
        session.answer(rid, _done(rid, answer.result()))


def _done(rid: int, answer: Withdrawn | None) -> Done:
    return Done(rid, None if answer is None else answer is Withdrawn.LEFT)


# --- semaphores ----------------------------------------------------------------------------


async def _create(session: ServerSession, message: CreateSemaphore) -> Struct:
    name = message.name
    _check_data(session, message.data, name)
    semaphores = session.context.counts.semaphores
    async with semaphores.creating(session.node, name, session.account):
        await session.store.create_semaphore(
            name, message.limit, message.data, exist_ok=message.exist_ok
        )
    return Done(message.rid)


async def _update(session: ServerSession, message: UpdateSemaphore) -> Struct:
    _check_data(session, message.data, message.name)
    await session.store.update_semaphore(message.name, message.data)
    return Done(message.rid)


async def _resize(session: ServerSession, message: ResizeSemaphore) -> Struct:
    await session.store.resize_semaphore(message.name, message.limit)
    return Done(message.rid)


async def _delete(session: ServerSession, message: DeleteSemaphore) -> Struct:
    deleting = session.store.delete_semaphore(message.name, force=message.force)
    if message.force:
        connection, audit = session.connection, session.context.audit
        actor = (None, None) if connection is None else (connection.identity, connection.peer)
        facts = {"node": session.node, "name": message.name, "session": session.store.id}
        with audit.action("semaphore deleted by force", *actor, **facts):
            await deleting
    else:
        await deleting
    session.context.counts.semaphores.deleted(session.node, message.name)
    return Done(message.rid)


async def _describe(
    session: ServerSession, message: DescribeSemaphore, connection: HolderConnection
) -> Struct | None:
    """Return the description; ``None`` if the holder has left the connection of its request."""
    most = session.context.limits.output_bytes // 2
    read = partial(
        session.store.describe_semaphore,
        message.name,
        owners=message.owners,
        waiters=message.waiters,
    )
    if not (message.owners or message.waiters):
        found = await read()
        await connection.wait_for_room(check_size(found, session.node, most))
        return SemaphoreDescribed(message.rid, semaphore_info(found))
    async with connection.reader.lock:
        if session.connection is not connection:
            return None
        found = await connection.reader.describe(read)
        await connection.wait_for_room(check_size(found, session.node, most))
        return SemaphoreDescribed(message.rid, await described(connection.reader, found))


def _start(work: _Work, session: ServerSession, message: Any) -> None:
    """Begin a changing operation that takes time, in order."""
    rid = message.rid
    if not session.answers.is_new(rid, session.send):
        return
    session.answers.unanswered.add(rid)
    assert session.connection is not None
    session.connection.count_pending()
    _begin(_carry_out(work, session, message, session.connection), session)


def _start_reading(session: ServerSession, message: DescribeSemaphore) -> None:
    """Begin a read in order, unless it has to wait for its turn."""
    price = READ_PRICE if message.owners or message.waiters else 1
    assert session.connection is not None
    session.connection.count_pending(price)
    _begin(_read(session, message, session.connection, price), session)


def _begin(work: Coroutine[Any, Any, None], session: ServerSession) -> None:
    session.host.start(work)
    session.starting = True
    asyncio.get_running_loop().call_soon(session.run_deferred)  # after the first step of the task


async def _carry_out(
    work: _Work, session: ServerSession, message: Any, connection: HolderConnection
) -> None:
    rid = message.rid
    try:
        answer = await work(session, message)
    except Exception as error:
        answer = session.failed(rid, error)
    finally:
        session.answers.unanswered.discard(rid)
        connection.uncount_pending()
    if session.error is None:  # otherwise the client has been notified of its end
        session.answer(rid, answer)


async def _read(
    session: ServerSession, message: DescribeSemaphore, connection: HolderConnection, price: int
) -> None:
    try:
        answer = await _describe(session, message, connection)
    except Exception as error:
        answer = session.failed(message.rid, error)
    finally:
        connection.uncount_pending(price)
    if session.error is None and answer is not None:
        session.send(answer)


# --- watches -------------------------------------------------------------------------------


def _watch(session: ServerSession, message: Watch) -> None:
    number = message.number
    try:
        if number in session.watches:
            raise InvalidArgument(f"there is a watch {number} already", node=session.node)
        _check_count(session, "watches_per_session", len(session.watches), message.name)
        session.watches[number] = session.store.watch(
            message.name,
            data=message.data,
            owners=message.owners,
            changed=partial(_changed, session, number),
        )
    except Exception as error:
        session.send(WatchRefused(session.channel, number, session.failed(0, error).error))


def _changed(session: ServerSession, number: int) -> None:
    if session.connection is not None and number in session.watches:
        session.connection.send_changed(session.channel, number)


def _unwatch(session: ServerSession, message: Unwatch) -> None:
    stop = session.watches.pop(message.number, None)
    if stop is not None:
        stop()


# --- its life ------------------------------------------------------------------------------


def _renew(session: ServerSession, message: Renew) -> None:
    assert session.connection is not None
    session.answers.acknowledge(message.acknowledged)
    session.requests.forget_recovered_data()
    session.renewals.renew(session.store, session.connection, session.channel, message.number)


SESSION_HANDLERS: dict[type[Struct], Callable[[ServerSession, Any], None]] = {
    Acknowledge: lambda session, message: session.answers.acknowledge(message.acknowledged),
    Alter: _alter,
    Close: lambda session, message: session.leave(message.rid, closing=True),
    CreateSemaphore: partial(_start, _create),
    DeleteSemaphore: partial(_start, _delete),
    DescribeSemaphore: _start_reading,
    Detach: lambda session, message: session.leave(message.rid, closing=False),
    Enqueue: _enqueue,
    Renew: _renew,
    Unwatch: _unwatch,
    UpdateSemaphore: partial(_start, _update),
    ResizeSemaphore: partial(_start, _resize),
    Watch: _watch,
    Withdraw: _withdraw,
}
"""Handlers of the messages for the session of a channel.

Not called after the session has ended, or while an operation is `starting`.
"""
