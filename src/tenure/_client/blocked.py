"""Waits that may be part of a deadlock: their publication, and the search for deadlocks.

`tenure.core.deadlocks` has the rule, and the reason why several readings show one state.

Each session has one `Blocked`, which knows two kinds of waits: those of tasks inside a lease or
ticket of the same node, and those for several tokens. A request for several tokens may be in the
way of smaller ones behind it, even if its task is inside nothing. A request for one token is not:
what is too much for it is too much for those behind it. Neither is one for a mutex. So all other
waits cost nothing. Rules:

* A wait of `BLOCKED` seconds is published, once: a request on `WAITS` with timeout 0. It is
  withdrawn in the call that ends the wait, and so before the task can release a lease. At most
  `MOST_PUBLISHED` waits of a session are published at a time.
* A failure to publish is no failure of the wait. After one that would repeat itself, such as a
  missing permission, the session publishes nothing any more.
* A session with ``on_deadlock="raise"`` looks for deadlocks when it has published a wait, and once
  a second while it has any. It reads the publications of its node, and at most `MOST_DESCRIBED`
  queues. If they have many requests, it looks less often: it reads at most `MOST_READ` a second.
* It raises for its own waits only. The victim of a deadlock is the same for every session.
* A task waits for one request at a time, so a task is known by its publication. Two tasks of a
  program have two. In `tenure.blocking` the worker task of a thread stands for the thread.
* Of a session that is taken over the new program withdraws the publications: its tasks are gone.

Not known, and so never part of a deadlock: leases that were acquired without a block, tasks that
wait for a child task, and waits in several queues at once (`any_of`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, Literal, TypeAlias

from tenure._client.request import HELD, WAITING, Request
from tenure._client.scope import entered_scopes, is_inside
from tenure._client.session_life import SessionLife
from tenure.core.deadlocks import (
    WAITS,
    deadlocks,
    decode,
    encode,
    relevant,
    shows_waits,
    standing,
    victim,
)
from tenure.engines.contract import Enqueued, Place, Withdrawn, when_answered
from tenure.errors import (
    AuthenticationFailed,
    Deadlock,
    InvalidArgument,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.identity import holder_name, semaphore_with_identities
from tenure.model import BlockedTask, RequestDescription, SemaphoreDescription

OnDeadlock: TypeAlias = Literal["wait", "raise"]
"""Reaction of a session to a deadlock of which one of its waits is the youngest: it waits on, or
the wait raises `Deadlock`."""

BLOCKED = 0.75
"""Seconds after which a wait is published. Within `LOOK` more each session has seen it."""

LOOK = 1.0
"""Least seconds between two searches for deadlocks."""

SHORTEST = 0.1
"""Least seconds between two looks at the waits."""

MOST_PUBLISHED = 100
MOST_DESCRIBED = 50
MOST_READ = 1000
MOST_DECODED = 1000
"""Publications that are examined: any program may write any number of them."""

_READ_TIMEOUT = 5.0

_log = logging.getLogger("tenure")

Describe: TypeAlias = Callable[[str], Awaitable[SemaphoreDescription]]
"""Describes a semaphore with its owners and waiters. Raises `SemaphoreNotFound`."""


def check_on_deadlock(on_deadlock: OnDeadlock) -> None:
    """Raise `InvalidArgument` for an unknown reaction."""
    if on_deadlock not in ("wait", "raise"):
        raise InvalidArgument(f"on_deadlock is 'wait' or 'raise', not {on_deadlock!r}")


class Wait:
    """One wait for a request.

    Attributes:
        deadlock: the deadlock of which it is the victim; the waiting task raises it.
        request: the request.
        task: the waiting task, if a task waits.
        since: when it began, on the client's clock.
        for_ever: whether it has no timeout.
        inside: whether the task is inside a block.
        may_deadlock: whether it may be part of a deadlock.
        looked: whether it has been looked at.
        long: whether the line about a long wait has been begun.
        logged: whether that line has been logged.
        suspects: what this program holds that may prevent the grant; the waiting task takes it.
    """

    __slots__ = (
        "deadlock",
        "for_ever",
        "inside",
        "logged",
        "long",
        "looked",
        "may_deadlock",
        "request",
        "since",
        "suspects",
        "task",
    )

    def __init__(
        self, request: Request, task: asyncio.Task[object] | None, since: float, for_ever: bool
    ) -> None:
        self.request = request
        self.task = task
        self.since = since
        self.for_ever = for_ever
        self.inside = is_inside(task)
        self.may_deadlock = self.inside or _is_large(request)
        self.looked = self.long = self.logged = False
        self.suspects: Sequence[Request] = ()
        self.deadlock: Sequence[BlockedTask] = ()


class Publication:
    """One published wait, until it is withdrawn.

    Args:
        session: the session that has published it.
        request_id: the number of its request.
        retry: sends its withdrawal again until the store confirms it.

    Attributes:
        answer: the store's answer to the request; ``None`` once it is known.
    """

    __slots__ = ("_retry", "_session", "answer", "id", "name")

    loss: ClassVar[Exception | None] = None

    def __init__(
        self, session: SessionLife[Request], request_id: int, retry: Callable[[Publication], None]
    ) -> None:
        self._session = session
        self._retry = retry
        self.id = request_id
        self.name = WAITS
        self.answer: asyncio.Future[Enqueued] | None = None

    @property
    def node(self) -> str:
        """The path of the node."""
        return self._session.node

    def withdraw(self) -> None:
        """Withdraw it; the answer is processed in the background, also after a failure."""
        session = self._session
        if session.why is not None:
            return  # the end releases everything
        try:
            answer = session.engine.withdraw(self.id)
        except Exception as error:
            self.withdrawal_failed(error)
            return
        if isinstance(answer, asyncio.Future):
            when_answered(answer, self._withdrawn)

    def _withdrawn(self, answer: asyncio.Future[Withdrawn]) -> None:
        error = answer.exception()
        if error is not None:
            self.withdrawal_failed(error)

    # Release retries (`Withdrawable`)

    def left(self, withdrawn: Withdrawn) -> None:
        """Record that it has left the queue."""

    def log_loss(self) -> None:
        """Log nothing: an evicted publication is no loss."""

    def withdrawal_failed(self, error: BaseException) -> None:
        """Process an error with which the store answered the withdrawal."""
        if isinstance(error, SessionExpired):
            self._session.ended(error)
        elif self._session.why is None:
            self._retry(self)


class Blocked:
    """The waits of one session that may be part of a deadlock, on its loop.

    Args:
        session: the session.
        new_request_id: returns the next number of a request.
        retry: sends the withdrawal of a publication again until the store confirms it.
        raises: whether a wait that is the victim of a deadlock raises.
    """

    def __init__(
        self,
        session: SessionLife[Request],
        new_request_id: Callable[[], int],
        retry: Callable[[Publication], None],
        *,
        raises: bool,
    ) -> None:
        self._session = session
        self._new_request_id = new_request_id
        self._retry = retry
        self._raises = raises
        self._pending: dict[Wait, asyncio.Task[object]] = {}  # not published yet, by age
        self._published: dict[Wait, Publication | None] = {}  # None: that has failed
        self._refused = not shows_waits(session.client.capabilities)
        self._searching = False
        self._search_at = 0.0
        self._read = 0  # requests that the current search has read
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wait: Wait) -> None:
        """Record a wait that may be part of a deadlock; `end` must follow."""
        task = wait.task
        if task is None or self._refused:
            return
        self._pending[wait] = task
        if self._timer is None:
            self._timer = self._session.loop.call_later(BLOCKED, self._look)

    def end(self, wait: Wait) -> None:
        """Record that the task no longer waits. Safe for a wait that was not recorded."""
        self._pending.pop(wait, None)
        publication = self._published.pop(wait, None)
        if publication is not None:
            if _is_running(self._session.loop):
                publication.withdraw()
            else:  # an abandoned task can be closed in any thread
                self._session.client.soon(publication.withdraw)

    def stop(self) -> None:
        """Look no more: the session has ended, and its waits end."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        session, now = self._session, self._session.now()
        due = [now + LOOK]
        for wait, task in list(self._pending.items()):
            # The timer of the loop and the client's clock may differ a little.
            if now - wait.since < BLOCKED - 0.01:
                due.append(wait.since + BLOCKED)
                break  # those that follow began later
            if session.state != "attached" or len(self._published) >= MOST_PUBLISHED:
                break
            if wait.request.state is WAITING and wait.request.order_id is not None:
                del self._pending[wait]
                self._publish(wait, task)
        searches = self._raises and any(self._published.values())
        if searches:
            if now >= self._search_at and not self._searching:
                self._searching, self._search_at = True, now + LOOK
                session.client.tasks.begin(self._search()).add_done_callback(self._searched)
            due.append(max(self._search_at, now + SHORTEST))
        if self._pending or searches:
            self._timer = session.loop.call_later(max(SHORTEST, min(due) - now), self._look)

    # Publications

    def _publish(self, wait: Wait, task: asyncio.Task[object]) -> None:
        session, request = self._session, wait.request
        self._published[wait] = None
        leases = [
            (each.name, each.order_id)
            for each in _entered(task)
            if each is not request
            and each.state in (HELD, WAITING)
            and each.node == request.node
            and each.session.client.url == session.client.url
            and each.order_id is not None
        ]
        if self._refused or not (leases or _is_large(request)):
            return
        assert request.order_id is not None
        data = encode(
            request.name,
            request.order_id,
            leases,
            task=task.get_name(),
            timeout=not wait.for_ever,
            raises=self._raises,
        )
        publication = Publication(session, self._new_request_id(), self._retry)
        self._published[wait] = publication
        try:
            answer = session.engine.enqueue(
                publication.id, WAITS, 1, data, timeout=0.0, ephemeral=True
            )
        except Exception as error:
            self._failed(wait, publication, error)
            return
        if isinstance(answer, Enqueued):
            self._placed(wait, publication, answer)
        else:
            publication.answer = answer
            when_answered(answer, partial(self._answered, wait, publication))

    def _answered(
        self, wait: Wait, publication: Publication, answer: asyncio.Future[Enqueued]
    ) -> None:
        publication.answer = None
        error = answer.exception()
        if error is None:
            self._placed(wait, publication, answer.result())
        else:
            self._failed(wait, publication, error)

    def _placed(self, wait: Wait, publication: Publication, placed: Enqueued) -> None:
        if placed[0] is Place.REFUSED:  # the name is in use for something else
            self._forget(wait, publication)

    def _failed(self, wait: Wait, publication: Publication, error: BaseException) -> None:
        """Process an error with which the store answered a publication."""
        self._forget(wait, publication)
        if isinstance(error, SessionExpired):
            self._session.ended(error)
        elif isinstance(error, AuthenticationFailed | InvalidArgument | Unsupported):
            self._refused = True
            self._pending.clear()
            _log.info("waits are not published: node=%s error=%s", self._session.node, error)
        else:
            publication.withdraw()  # it may have reached the queue

    def _forget(self, wait: Wait, publication: Publication) -> None:
        if self._published.get(wait) is publication:
            self._published[wait] = None

    # Search

    async def _search(self) -> None:
        session = self._session
        began, self._read = session.now(), 0
        try:
            async with asyncio.timeout(_READ_TIMEOUT):
                await self._search_now()
        except (TenureError, TimeoutError):
            pass  # an outage, or the end of the session; the next search follows
        except Exception:
            _log.exception("could not look for deadlocks: node=%s", session.node)
        finally:
            self._search_at = began + max(LOOK, self._read / MOST_READ)

    def _searched(self, _: asyncio.Task[None]) -> None:
        self._searching = False

    async def _search_now(self) -> None:
        session = self._session
        answers = [each.answer for each in self._published.values() if each and each.answer]
        if answers:
            await asyncio.wait(answers)
        found = await read_deadlocks(
            self._describe, {wait.request.name for wait in self._published}
        )
        waits = {(wait.request.name, wait.request.order_id): wait for wait in self._published}
        for members in found:
            task = victim(members)
            if task is None or task.session_id != session.id:
                continue
            wait = waits.get((task.name, task.order_id))
            if wait is not None and wait.request.state is WAITING:
                wait.deadlock = members
                wait.request.wake()

    async def _describe(self, name: str) -> SemaphoreDescription:
        described = await self._session.engine.describe_semaphore(name, owners=True, waiters=True)
        self._read += len(described.owners) + len(described.waiters)
        return semaphore_with_identities(described)


def _is_large(request: Request) -> bool:
    """Return true if the request may be in the way of smaller ones behind it."""
    return request.count > 1 and request.options.kind != "mutex"


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _entered(task: asyncio.Task[object]) -> Iterable[Request]:
    for scope in entered_scopes(task):
        if isinstance(scope.owner, Request):
            yield scope.owner


# Readings


async def read_tasks(describe: Describe) -> list[BlockedTask]:
    """Read the publications of a node."""
    try:
        found = await describe(WAITS)
    except SemaphoreNotFound:
        return []
    owners = found.owners[:MOST_DECODED]
    return [task for owner in owners if (task := decode(owner)) is not None]


async def read_deadlocks(
    describe: Describe, names: Iterable[str] | None = None
) -> list[tuple[BlockedTask, ...]]:
    """Read the deadlocks of a node.

    Args:
        describe: describes a semaphore of the node.
        names: only those of waits for these names, and of what they wait for in turn; ``None`` for
            all.
    """
    tasks = relevant(await read_tasks(describe))
    wanted = {task.name for task in tasks}
    if names is None:
        queues, _ = await read_queues(describe, wanted, tasks, len(wanted))
    else:
        queues, _ = await read_queues(describe, wanted & set(names), tasks, MOST_DESCRIBED)
    return deadlocks(standing(tasks, queues), queues)


async def read_queues(
    describe: Describe, names: Iterable[str], tasks: Sequence[BlockedTask], most: int
) -> tuple[dict[str, SemaphoreDescription], bool]:
    """Describe semaphores, and those for which the tasks in their queues wait, and so on.

    Args:
        describe: describes a semaphore of the node.
        names: the first semaphores; one that does not exist is left out.
        tasks: the blocked tasks, read before.
        most: the greatest number of semaphores to describe.

    Returns:
        The semaphores by name, and whether all were described.
    """
    waits_for = {request: task.name for task in tasks for request in task.requests}
    queues: dict[str, SemaphoreDescription] = {}
    left, seen = list(dict.fromkeys(names)), set[str]()
    while left:
        name = left.pop(0)
        if name in seen:
            continue
        if len(seen) == most:
            return queues, False
        seen.add(name)
        try:
            queues[name] = found = await describe(name)
        except SemaphoreNotFound:
            continue
        for each in (*found.owners, *found.waiters):
            following = waits_for.get((name, each.order_id))
            if following is not None:
                left.append(following)
    return queues, True


def deadlock_error(request: Request, tasks: Sequence[BlockedTask]) -> Deadlock:
    """Return the error of a wait that is the victim of a deadlock."""
    return Deadlock(
        f"{request.options.kind} {request.name!r} on {request.node}: not acquired, because of a "
        f"deadlock: {deadlock_sentence(tasks)}. This wait began last; release what the task holds, "
        "and begin again",
        node=request.node,
        name=request.name,
        tasks=tasks,
    )


def deadlock_sentence(tasks: Sequence[BlockedTask]) -> str:
    """Return the waits of a deadlock in words."""
    awaited = {task.name for task in tasks}
    return "; ".join(
        f"{task_name(task)} {_inside(task, awaited)}waits for {task.name!r}" for task in tasks
    )


def _inside(task: BlockedTask, awaited: set[str]) -> str:
    inside = dict.fromkeys(name for name, _ in task.leases if name in awaited)
    return f"is inside {' and '.join(map(repr, inside))} and " if inside else ""


def task_name(task: BlockedTask) -> str:
    """Return a task for people: ``backup.py, pid 4242 on db-1 (Task-7)``."""
    request = RequestDescription(
        task.session_id, task.order_id, 1, b"", host=task.host, pid=task.pid, program=task.program
    )
    shown = task.task if task.task.isprintable() else ascii(task.task)
    return f"{holder_name(request)} ({shown})" if shown else holder_name(request)
