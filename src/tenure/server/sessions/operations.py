"""Operations on a hosted session: one function for each message of its holder.

Each begins its operation within the call, so that the store gets everything in the order in which
it came, and answers at once where the engine does. See `tenure.server.sessions.session` for what
happens on cancel, disconnect and close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

from msgspec import Struct

from tenure.engines.contract import Enqueued, Withdrawn
from tenure.errors import InvalidArgument, TenureError
from tenure.model import UNCHANGED, SemaphoreDescription
from tenure.server.limits import Count, LimitReached
from tenure.server.reads import PRICE
from tenure.server.sessions.connection import Link
from tenure.server.sessions.describing import check_size, described, semaphore_info
from tenure.server.sessions.requests import Request, error_of
from tenure.server.sessions.session import Hosted
from tenure.wire.messages import (
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
    SemaphoreDescribed,
    Unwatch,
    UpdateSemaphore,
    Watch,
    WatchRefused,
    Withdraw,
)

__all__ = ["SESSION_HANDLERS"]

_Work: TypeAlias = Callable[[Hosted, Any], Coroutine[Any, Any, Struct]]


def _check_data(session: Hosted, data: bytes, name: str | None) -> None:
    most = session.hosting.limits.data_bytes
    if len(data) > most:
        raise LimitReached(
            f"this server takes at most {most} bytes of data (its limit data_bytes), not "
            f"{len(data)}; store it elsewhere and keep its address here",
            "data_bytes",
            node=session.node,
            name=name,
        )


def _check_count(session: Hosted, limit: str, count: int, name: str) -> None:
    most = getattr(session.hosting.limits, limit)
    if count >= most:
        raise Count(limit, most, "this session").reached(node=session.node, name=name)


# --- requests ------------------------------------------------------------------------------


def _enqueue(session: Hosted, message: Enqueue) -> None:
    rid, hold, name = message.rid, message.hold, message.name
    if not session.answers.is_new(rid, session.say):
        return
    requests = session.places.requests
    try:
        _check_data(session, message.data, name)
        if hold in requests:
            raise InvalidArgument(
                f"hold {hold} of this session on {session.node} is in a queue already",
                node=session.node,
                name=name,
            )
        _check_count(session, "requests_per_session", len(requests), name)
        session.hosting.semaphores.join(
            session.node, name, ephemeral=message.ephemeral, account=session.account
        )
    except TenureError as error:
        session.fail(rid, error)
        return
    requests[hold] = request = Request(name, message.count, message.ephemeral)
    try:
        answer = session.store.enqueue(
            hold,
            name,
            message.count,
            message.data,
            timeout=message.timeout,
            ephemeral=message.ephemeral,
        )
    except Exception as error:
        session.places.drop(hold, request)
        session.fail(rid, error)
        return
    if isinstance(answer, asyncio.Future):
        request.placing = rid, answer
        session.answers.unanswered.add(rid)
        assert session.link is not None
        session.link.begun()
        answer.add_done_callback(partial(_when_placed, session, session.link, hold, request))
    else:
        session.place(rid, hold, request, answer)


def _when_placed(
    session: Hosted, link: Link, hold: int, request: Request, answer: asyncio.Future[Enqueued]
) -> None:
    link.finished()
    error = error_of(answer)
    if request.placing is not None and session.error is None:
        session.answer_placing(hold, request, error)


def _withdraw(session: Hosted, message: Withdraw) -> None:
    rid, hold = message.rid, message.hold
    if not session.answers.is_new(rid, session.say):
        return
    request = session.places.requests.get(hold)
    if request is not None:
        session.places.drop(hold, request)
    elif session.places.removals:
        session.places.removals.pop(hold, None)
    try:
        answer = session.store.withdraw(hold)
    except Exception as error:
        session.fail(rid, error)
        return
    if isinstance(answer, asyncio.Future):
        _answer_later(session, rid, answer)
    else:
        session.answer(rid, _done(rid, answer))


def _alter(session: Hosted, message: Alter) -> None:
    rid = message.rid
    if not session.answers.is_new(rid, session.say):
        return
    request = session.places.requests.get(message.hold)
    try:
        if message.data is not None:
            _check_data(session, message.data, None if request is None else request.name)
        answer = session.store.alter(
            message.hold,
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


def _answer_later(session: Hosted, rid: int, answer: asyncio.Future[Any]) -> None:
    assert session.link is not None
    session.answers.unanswered.add(rid)
    session.link.begun()
    answer.add_done_callback(partial(_when_done, session, session.link, rid))


def _when_done(session: Hosted, link: Link, rid: int, answer: asyncio.Future[Any]) -> None:
    link.finished()
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


async def _create(session: Hosted, message: CreateSemaphore) -> Struct:
    name = message.name
    _check_data(session, message.data, name)
    async with session.hosting.semaphores.creating(session.node, name, session.account):
        await session.store.create_semaphore(
            name, message.limit, message.data, exist_ok=message.exist_ok
        )
    return Done(message.rid)


async def _update(session: Hosted, message: UpdateSemaphore) -> Struct:
    _check_data(session, message.data, message.name)
    await session.store.update_semaphore(message.name, message.data)
    return Done(message.rid)


async def _delete(session: Hosted, message: DeleteSemaphore) -> Struct:
    deleting = session.store.delete_semaphore(message.name, force=message.force)
    if message.force:
        link, audit = session.link, session.hosting.context.audit
        who = (None, None) if link is None else (link.identity, link.peer)
        facts = {"node": session.node, "name": message.name, "session": session.store.id}
        with audit.action("semaphore deleted by force", *who, **facts):
            await deleting
    else:
        await deleting
    session.hosting.semaphores.deleted(session.node, message.name)
    return Done(message.rid)


async def _describe(session: Hosted, message: DescribeSemaphore, link: Link) -> Struct | None:
    """The description; ``None`` if the holder has left the connection on which it asked."""
    if not (message.owners or message.waiters):
        found, size = await _described_in_store(session, message)
        await link.room(size)
        return SemaphoreDescribed(message.rid, semaphore_info(found))
    async with link.reader.lock:
        if session.link is not link:
            return None
        async with link.reader:
            found, size = await _described_in_store(session, message)
        await link.room(size)
        return SemaphoreDescribed(message.rid, await described(link.reader, found))


async def _described_in_store(
    session: Hosted, message: DescribeSemaphore
) -> tuple[SemaphoreDescription, int]:
    """The description, and about how many bytes it takes in a message."""
    found = await session.store.describe_semaphore(
        message.name, owners=message.owners, waiters=message.waiters
    )
    return found, check_size(found, session.node, session.hosting.limits.output_bytes // 2)


def _start(work: _Work, session: Hosted, message: Any) -> None:
    """Begin what changes something and takes time, in its order."""
    rid = message.rid
    if not session.answers.is_new(rid, session.say):
        return
    session.answers.unanswered.add(rid)
    assert session.link is not None
    session.link.begun()
    _begin(_carry_out(work, session, message, session.link), session)


def _start_reading(session: Hosted, message: DescribeSemaphore) -> None:
    """Begin a read, in its order, unless it has to wait for its turn."""
    price = PRICE if message.owners or message.waiters else 1
    assert session.link is not None
    session.link.begun(price)
    _begin(_read(session, message, session.link, price), session)


def _begin(work: Coroutine[Any, Any, None], session: Hosted) -> None:
    session.hosting.start(work)
    session.starting = True
    asyncio.get_running_loop().call_soon(session.go_on)  # behind the task's first step


async def _carry_out(work: _Work, session: Hosted, message: Any, link: Link) -> None:
    rid = message.rid
    try:
        answer = await work(session, message)
    except Exception as error:
        answer = session.failed(rid, error)
    finally:
        session.answers.unanswered.discard(rid)
        link.finished()
    if session.error is None:  # else the client has been notified of its end
        session.answer(rid, answer)


async def _read(session: Hosted, message: DescribeSemaphore, link: Link, price: int) -> None:
    try:
        answer = await _describe(session, message, link)
    except Exception as error:
        answer = session.failed(message.rid, error)
    finally:
        link.finished(price)
    if session.error is None and answer is not None:
        session.say(answer)


# --- watches -------------------------------------------------------------------------------


def _watch(session: Hosted, message: Watch) -> None:
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
        session.say(WatchRefused(session.channel, number, session.failed(0, error).error))


def _changed(session: Hosted, number: int) -> None:
    if session.link is not None and number in session.watches:
        session.link.changed(session.channel, number)


def _unwatch(session: Hosted, message: Unwatch) -> None:
    stop = session.watches.pop(message.number, None)
    if stop is not None:
        stop()


# --- its life ------------------------------------------------------------------------------


def _renew(session: Hosted, message: Renew) -> None:
    assert session.link is not None
    session.answers.acknowledge(message.acknowledged)
    session.places.told()
    session.renewals.renew(session.store, session.link, session.channel, message.number)


def _acknowledge(session: Hosted, message: Acknowledge) -> None:
    session.answers.acknowledge(message.acknowledged)


def _close(session: Hosted, message: Close) -> None:
    session.leave(message.rid, closing=True)


def _detach(session: Hosted, message: Detach) -> None:
    session.leave(message.rid, closing=False)


SESSION_HANDLERS: dict[type[Struct], Callable[[Hosted, Any], None]] = {
    Acknowledge: _acknowledge,
    Alter: _alter,
    Close: _close,
    CreateSemaphore: partial(_start, _create),
    DeleteSemaphore: partial(_start, _delete),
    DescribeSemaphore: _start_reading,
    Detach: _detach,
    Enqueue: _enqueue,
    Renew: _renew,
    Unwatch: _unwatch,
    UpdateSemaphore: partial(_start, _update),
    Watch: _watch,
    Withdraw: _withdraw,
}
"""What carries out each message that is for the session on its channel.

Not to be called while the session is over, or has something `starting`.
"""
