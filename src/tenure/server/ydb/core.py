"""A session's conversation, from SessionStarted on, without I/O: messages in, messages out.

Whoever drives a `Conversation` gives it the client's messages (`received`), what the store answers
(`answered`, `refused`) and what it pushes (`granted`, `removed`, `ended`), and after each of
these sends the messages in `replies`, in their order, and carries out the `operations`. Rules:

* **One thing at a time for each name.** What is asked of one semaphore is done in the order in
  which it was asked, each when the one before has been answered; different names do not wait for
  each other. So what a script knows of a request is true from one of its steps to the next.
* **What is pushed meanwhile waits.** A grant or a removal is noted, and told after the reply to
  what is being done, and changes of what is watched are told last: first the requester's reply,
  then results of requests that waited, then Changed.
* **One answer for each question.** `_Place.asked` is the one request id that still waits for the
  result of an acquire, and a watch is told once and forgotten.
* **A pong is a proof.** It is owed until the store has extended the session's expiry in answer to
  something that was sent after the client's ping had come.
* After a Failure or SessionStopped (`over`) nothing more is said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeAlias

from tenure.core import rules
from tenure.engines.contract import Enqueued, Place, Removal
from tenure.errors import (
    InvalidArgument,
    LeaseReleased,
    TenureError,
)
from tenure.model import Recovered, SemaphoreDescription
from tenure.server.limits import LimitReached, Limits
from tenure.server.ydb import answers
from tenure.server.ydb.messages import Response, Status, failure, status_of
from tenure.server.ydb.operations import (
    Alter,
    Create,
    Delete,
    Describe,
    Enqueue,
    Operation,
    Update,
    Withdraw,
)

__all__ = ["FOREVER", "Books", "Conversation", "Job", "StartWatch"]

FOREVER = 2**64 - 1
"""The timeout of an acquire that waits until it is granted, in milliseconds."""
_LONGEST_WAIT = 24 * 60 * 60 * 1000
_PONGS_OWED = 16  # to a client that pings more often than its store answers; then the oldest goes

Script: TypeAlias = Generator[Operation, Any, None]
StartWatch: TypeAlias = Callable[[str, bool, bool, Callable[[], None]], Callable[[], None]]
"""``start(name, data, owners, changed)``: watch, as the contract says; returns what ends it."""


class Books(Protocol):
    """Where requests are counted against the server's limits."""

    def join(self, node: str, name: str, *, ephemeral: bool) -> None:
        """Raises `LimitReached`."""

    def rejoin(self, node: str, name: str, *, ephemeral: bool) -> None: ...

    def leave(self, node: str, name: str) -> None: ...


class Job:
    """An operation that is to be carried out, and what goes on when it has been."""

    __slots__ = ("name", "operation", "script")

    def __init__(self, operation: Operation, name: str, script: Script) -> None:
        self.operation = operation
        self.name = name
        self.script = script


class _Place:
    """The session's request for a name.

    Attributes:
        asked: the request id that waits for the result; ``None`` if nobody asks.
        granted: it owns its tokens.
        gone: why it has left the queue, if the store said so.
    """

    __slots__ = ("asked", "count", "ephemeral", "gone", "granted", "hold", "name")

    def __init__(self, hold: int, name: str, count: int, ephemeral: bool) -> None:
        self.hold = hold
        self.name = name
        self.count = count
        self.ephemeral = ephemeral
        self.asked: int | None = None
        self.granted = False
        self.gone: Removal | None = None


class _Watch:
    """What a describe asked to be told of, once.

    Attributes:
        seen: the state that the describe was answered with. Stores may tell of changes that are
            in it already, and clients are not told of these.
    """

    __slots__ = ("asked", "data", "name", "owners", "seen", "stop")

    def __init__(self, name: str, asked: int, data: bool, owners: bool) -> None:
        self.name = name
        self.asked = asked
        self.data = data
        self.owners = owners
        self.seen = (0, 0)
        self.stop: Callable[[], None] = _nothing


def _nothing() -> None:
    """There is nothing to stop yet."""


def _state(found: SemaphoreDescription) -> tuple[int, int]:
    """What differs when the data, and when the owners have changed."""
    owners = tuple((each.order_id, each.count, each.data) for each in found.owners)
    return hash(found.data), hash(owners)


class Conversation:
    """What is said on one stream.

    Args:
        node: the path of the session's node.
        limits: what the client may make it hold.
        books: where its requests are counted.
        start_watch: how a watch is started.
        look: called when a change was noted; `tell_changes` is then to be called soon.

    Attributes:
        replies: what is to be sent, in order.
        operations: what is to be carried out, in order.
        renew: the session is to be renewed at the store: the client was heard of.
        stopped: the client has asked for the session's end.
        over: a Failure or SessionStopped has been said.
    """

    def __init__(
        self,
        node: str,
        limits: Limits,
        books: Books,
        start_watch: StartWatch,
        look: Callable[[], None],
    ) -> None:
        self.replies: list[Any] = []
        self.operations: deque[Job] = deque()
        self.renew = False
        self.stopped = False
        self.over = False
        self.unanswered = 0
        self._node = node
        self._number = 0
        self._next_hold = 0
        self._limits = limits
        self._books = books
        self._start_watch = start_watch
        self._look = look
        self._places: dict[str, _Place] = {}
        self._by_hold: dict[int, _Place] = {}
        self._watches: dict[str, _Watch] = {}
        self._changed: dict[_Watch, None] = {}
        self._busy: dict[str, deque[Script]] = {}
        self._outstanding = 0
        self._pongs: deque[tuple[float, int]] = deque(maxlen=_PONGS_OWED)
        self._scripts: dict[str, Callable[[Any], Script]] = {
            "acquire_semaphore": self._acquire,
            "release_semaphore": self._release,
            "describe_semaphore": self._describe,
            "create_semaphore": self._create,
            "update_semaphore": self._update,
            "delete_semaphore": self._delete,
        }

    # What the driver says

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """The session has these requests already. Of several for a name the first is the one."""
        for each in requests:
            if each.name not in self._places:
                place = _Place(each.hold, each.name, each.count, each.ephemeral)
                place.granted = each.granted
                self._books.rejoin(self._node, each.name, ephemeral=each.ephemeral)
                self._places[each.name] = self._by_hold[each.hold] = place

    def started(self, number: int, timeout_millis: int, first_hold: int, opaque: int) -> None:
        """The session is attached: say so, and ping.

        Args:
            number: the session's id.
            timeout_millis: how long it survives without contact.
            first_hold: from here on the session has used no hold number.
            opaque: what the ping carries.
        """
        self._number = number
        self._next_hold = first_hold
        if self.over:
            return  # it was taken over, or has ended, while it was being attached
        started = Response.SessionStarted(session_id=number, timeout_millis=timeout_millis)
        self.replies.append(Response(session_started=started))
        self.tick(opaque)

    @property
    def waits_for_pong(self) -> bool:
        """Whether a ping is unanswered."""
        return self._outstanding != 0

    def tick(self, opaque: int) -> None:
        """It is time for a ping, with `opaque`; the one before must have been answered."""
        if self.over:
            return
        if self._outstanding:
            self.fail(Status.TIMEOUT, "the client has not answered a ping in time")
            return
        self._outstanding = opaque
        self.replies.append(Response(ping=Response.PingPong(opaque=opaque)))

    def received(self, request: Any, now: float) -> None:
        """The client says `request`; it came at `now`."""
        if self.over:
            return
        kind = request.WhichOneof("request")
        script = self._scripts.get(kind) if kind else None
        if script is not None:
            asked = getattr(request, kind)
            self.unanswered += 1
            self._enter(asked.name, script(asked))
        elif kind == "ping":
            self._heard(request.ping.opaque)
            self._pongs.append((now, request.ping.opaque))
            self.renew = True
        elif kind == "pong":
            if not self._heard(request.pong.opaque):
                self.fail(Status.BAD_REQUEST, "a pong that answers no ping")
            self.renew = True
        elif kind == "session_stop":
            self.stopped = True
            self._end()
        elif kind == "session_start":
            self.fail(Status.BAD_REQUEST, "a session is started once on a stream")
        else:
            what = f"{kind} is not supported" if kind else "it is empty, or not known here"
            self.fail(Status.BAD_REQUEST, f"a request that cannot be served: {what}")

    def proven(self, at: float) -> None:
        """The store had extended the session's expiry in answer to what was sent at `at`."""
        while self._pongs and self._pongs[0][0] <= at and not self.over:
            _, opaque = self._pongs.popleft()
            self.replies.append(Response(pong=Response.PingPong(opaque=opaque)))

    def answered(self, job: Job, outcome: Any) -> None:
        """An operation has been carried out."""
        if not self.over:
            self._go_on(job.name, job.script, outcome, None)

    def refused(self, job: Job, error: TenureError) -> None:
        """An operation could not be carried out."""
        if not self.over:
            self._go_on(job.name, job.script, None, error)

    def granted(self, hold: int) -> None:
        """A request that waited owns its tokens."""
        place = self._by_hold.get(hold)
        if place is not None:
            place.granted = True
            self._settle(place.name)

    def removed(self, hold: int, why: Removal) -> None:
        """A request has left its queue, and the client did not ask for it."""
        place = self._by_hold.get(hold)
        if place is not None:
            place.gone = why
            self._settle(place.name)

    def tell_changes(self) -> None:
        """Tell what has changed of what is watched, where nothing else is going on."""
        for watch in [watch for watch in self._changed if watch.name not in self._busy]:
            del self._changed[watch]
            self.unanswered += 1
            self._enter(watch.name, self._tell_change(watch))

    def closed(self) -> None:
        """The session that the client asked to stop is over."""
        stopped = Response.SessionStopped(session_id=self._number)
        self.replies.append(Response(session_stopped=stopped))

    def fail(self, status: int, text: str) -> None:
        """Say that it cannot go on, and nothing more."""
        if not self.over:
            self.replies.append(failure(status, text))
            self._end()

    def leave(self) -> None:
        """The stream is over: nothing is watched or counted any more. Safe to call twice."""
        self._end()

    def _end(self) -> None:
        self.over = True
        self.operations.clear()
        for watch in self._watches.values():
            watch.stop()
        self._watches.clear()
        self._changed.clear()
        for place in list(self._places.values()):
            self._forget(place)

    def _heard(self, opaque: int) -> bool:
        """Whether the outstanding ping is answered by that."""
        answers_it = opaque != 0 and opaque == self._outstanding
        if answers_it:
            self._outstanding = 0
        return answers_it

    # One thing at a time for each name

    def _enter(self, name: str, script: Script) -> None:
        queue = self._busy.get(name)
        if queue is None:
            self._busy[name] = deque()
            self._go_on(name, script, None, None)
        else:
            queue.append(script)

    def _go_on(self, name: str, script: Script, outcome: Any, error: TenureError | None) -> None:
        """Have a script take its next step; when it has ended, settle and begin the next one."""
        queue = self._busy[name]
        while True:
            try:
                operation = script.send(outcome) if error is None else script.throw(error)
            except StopIteration:
                self.unanswered -= 1
            else:
                self.operations.append(Job(operation, name, script))
                return
            if queue:
                self._tell(name)
                script, outcome, error = queue.popleft(), None, None
            else:
                del self._busy[name]
                self._settle(name)
                if self._changed:
                    self._look()
                return

    def _settle(self, name: str) -> None:
        if name not in self._busy:
            self._tell(name)

    def _tell(self, name: str) -> None:
        """Tell the result of what waited, if there is one that was not told yet."""
        place = self._places.get(name)
        if place is None:
            return
        if place.asked is not None:
            if place.granted:
                self.replies.append(answers.acquired(place.asked, True))
                place.asked = None
            elif place.gone is not None:
                self._tell_gone(place.asked, place.gone)
        if place.gone is not None:
            self._forget(place)

    def _tell_gone(self, asked: int, why: Removal) -> None:
        if why is Removal.TIMED_OUT:
            self.replies.append(answers.acquired(asked, False))
        else:
            self.replies.append(answers.aborted(asked, f"the request was removed: {why.value}"))

    def _forget(self, place: _Place) -> None:
        del self._places[place.name]
        del self._by_hold[place.hold]
        self._books.leave(self._node, place.name)

    # Acquire and release

    def _acquire(self, ask: Any) -> Script:
        if ask.count == 0:
            self._refuse_acquire(ask, Status.BAD_REQUEST, "a count is at least 1")
            return
        if ask.timeout_millis > _LONGEST_WAIT and ask.timeout_millis != FOREVER:
            text = "a timeout is at most 24 hours, or 2^64-1 for ever"
            self._refuse_acquire(ask, Status.BAD_REQUEST, text)
            return
        if text := self._wrong_with(ask.name, ask.data):
            self._refuse_acquire(ask, Status.BAD_REQUEST, text)
            return
        place = self._places.get(ask.name)
        if place is None:
            yield from self._enqueue(ask)
        elif place.ephemeral != ask.ephemeral:
            kind = "ephemeral" if place.ephemeral else "lasting"
            text = f"{ask.name!r} is {kind} and was asked for as the other"
            self._refuse_acquire(ask, Status.PRECONDITION_FAILED, text)
        elif place.count < ask.count:
            text = f"the session's request for {ask.name!r} cannot grow from {place.count}"
            self._refuse_acquire(ask, Status.BAD_REQUEST, text)
        else:
            yield from self._acquire_again(place, ask)

    def _enqueue(self, ask: Any) -> Script:
        try:
            if len(self._places) >= self._limits.requests_per_session:
                raise LimitReached(
                    f"the session has as many requests as the server's limit requests_per_session "
                    f"= {self._limits.requests_per_session} allows",
                    "requests_per_session",
                )
            self._books.join(self._node, ask.name, ephemeral=ask.ephemeral)
        except LimitReached as error:
            self._refuse_acquire(ask, Status.OVERLOADED, str(error))
            return
        place = _Place(self._next_hold, ask.name, ask.count, ask.ephemeral)
        self._next_hold += 1
        self._places[place.name] = self._by_hold[place.hold] = place
        try:
            enqueued: Enqueued = yield Enqueue(
                place.hold, ask.name, ask.count, ask.data, _seconds(ask), ask.ephemeral
            )
        except TenureError as error:
            self._forget(place)
            status = status_of(error)
            if isinstance(error, InvalidArgument):
                status = yield from self._why_invalid(ask)
            self._refuse_acquire(ask, status, str(error))
            return
        if enqueued.place is Place.REFUSED:
            self._forget(place)
            self.replies.append(answers.acquired(ask.req_id, False))
            return
        place.asked = ask.req_id
        if enqueued.place is Place.GRANTED:
            place.granted = True
        if not place.granted and place.gone is None:
            self.replies.append(answers.pending(ask.req_id))

    def _acquire_again(self, place: _Place, ask: Any) -> Script:
        """The session has a request for that name already: it is changed in place."""
        waiting = not place.granted
        try:
            yield Alter(place.hold, ask.name, ask.count, ask.data, waiting, _seconds(ask))
        except LeaseReleased:  # it has left the queue, and the news of it is on its way, or here
            self._abort(place)
            self._forget(place)
            yield from self._enqueue(ask)
            return
        except TenureError as error:
            self._refuse_acquire(ask, status_of(error), str(error))
            return
        place.count = ask.count
        if waiting:
            self._abort(place)
        place.asked = ask.req_id
        if not place.granted and place.gone is None and ask.timeout_millis:
            self.replies.append(answers.pending(ask.req_id))

    def _abort(self, place: _Place) -> None:
        """Nobody is told any more how the waiting acquire ends."""
        if place.asked is not None:
            if place.gone is Removal.TIMED_OUT:
                self._tell_gone(place.asked, place.gone)
            else:
                text = "another request of the session has taken its place"
                self.replies.append(answers.aborted(place.asked, text))
            place.asked = None

    def _why_invalid(self, ask: Any) -> Generator[Operation, Any, int]:
        """The status for an acquire that the store found wrong."""
        try:
            found: SemaphoreDescription = yield Describe(ask.name)
        except TenureError:
            return Status.BAD_REQUEST
        mismatch = found.ephemeral != ask.ephemeral
        return Status.PRECONDITION_FAILED if mismatch else Status.BAD_REQUEST

    def _refuse_acquire(self, ask: Any, status: int, text: str) -> None:
        self.replies.append(answers.not_acquired(ask.req_id, status, text))

    def _release(self, ask: Any) -> Script:
        place = self._places.get(ask.name)
        if place is None:
            self.replies.append(answers.released(ask.req_id, False))
            return
        try:
            yield Withdraw(place.hold, ask.name)
        except TenureError as error:
            self.replies.append(answers.not_released(ask.req_id, status_of(error), str(error)))
            return
        was_there = place.gone is None
        self._abort(place)
        self._forget(place)
        self.replies.append(answers.released(ask.req_id, was_there))

    # The semaphores themselves

    def _create(self, ask: Any) -> Script:
        text = self._wrong_with(ask.name, ask.data)
        if not text and ask.limit == 0:
            text = "a limit is at least 1"
        if text:
            self.replies.append(answers.created(ask.req_id, Status.BAD_REQUEST, text))
            return
        try:
            yield Create(ask.name, ask.limit, ask.data)
        except InvalidArgument as error:  # an ephemeral one is there: all else has been checked
            self.replies.append(answers.created(ask.req_id, Status.PRECONDITION_FAILED, str(error)))
        except TenureError as error:
            self.replies.append(answers.created(ask.req_id, status_of(error), str(error)))
        else:
            self.replies.append(answers.created(ask.req_id))

    def _update(self, ask: Any) -> Script:
        if text := self._wrong_with(ask.name, ask.data):
            self.replies.append(answers.updated(ask.req_id, Status.BAD_REQUEST, text))
            return
        try:
            yield Update(ask.name, ask.data)
        except TenureError as error:
            self.replies.append(answers.updated(ask.req_id, status_of(error), str(error)))
        else:
            self.replies.append(answers.updated(ask.req_id))

    def _delete(self, ask: Any) -> Script:
        try:
            found: SemaphoreDescription = yield Describe(ask.name)
            if found.ephemeral:
                text = f"{ask.name!r} is ephemeral: it goes with its last request"
                self.replies.append(answers.deleted(ask.req_id, Status.PRECONDITION_FAILED, text))
                return
            yield Delete(ask.name, ask.force)
        except TenureError as error:
            self.replies.append(answers.deleted(ask.req_id, status_of(error), str(error)))
            return
        place = self._places.get(ask.name)
        if place is not None:
            self._abort(place)
            self._forget(place)
        watch = self._watches.get(ask.name)
        if watch is not None:
            self._drop(watch)
            self.replies.append(answers.changed(watch.asked, data=True, owners=True))
        self.replies.append(answers.deleted(ask.req_id))

    def _wrong_with(self, name: str, data: bytes) -> str:
        """What is wrong with these, or nothing."""
        try:
            rules.check_name(name, self._node)
        except InvalidArgument as error:
            return str(error)
        most = self._limits.data_bytes
        if len(data) > most:
            return f"data has at most {most} bytes (limit data_bytes), this has {len(data)}"
        return ""

    # Describing and watching

    def _describe(self, ask: Any) -> Script:
        old = self._watches.get(ask.name)
        new = None
        try:
            if ask.watch_data or ask.watch_owners:
                new = self._watch(ask, replaces=old is not None)
            found: SemaphoreDescription = yield Describe(
                ask.name, ask.include_owners or ask.watch_owners, ask.include_waiters
            )
        except TenureError as error:
            if new is not None:
                self._drop(new)
            self.replies.append(answers.not_described(ask.req_id, status_of(error), str(error)))
            return
        described = answers.described(
            ask.req_id, found, owners=ask.include_owners, watched=new is not None
        )
        if (size := described.ByteSize()) > self._limits.output_bytes // 2:
            text = f"the description has {size} bytes; ask without owners and waiters"
            described = answers.not_described(ask.req_id, Status.OVERLOADED, text)
            if new is not None:
                self._drop(new)
        elif new is not None:
            new.seen = _state(found)
            if old is not None:
                self._drop(old)
                self.replies.append(answers.changed(old.asked, data=False, owners=False))
            self._watches[ask.name] = new
        self.replies.append(described)

    def _watch(self, ask: Any, *, replaces: bool) -> _Watch:
        if not replaces and len(self._watches) >= self._limits.watches_per_session:
            raise LimitReached(
                "the session has as many watches as the server's limit watches_per_session = "
                f"{self._limits.watches_per_session} allows",
                "watches_per_session",
            )
        watch = _Watch(ask.name, ask.req_id, ask.watch_data, ask.watch_owners)
        watch.stop = self._start_watch(
            ask.name, watch.data, watch.owners, lambda: self._note(watch)
        )
        return watch

    def _note(self, watch: _Watch) -> None:
        """What is watched may have changed; it is told when nothing else goes on there."""
        self._changed[watch] = None
        self._look()

    def _tell_change(self, watch: _Watch) -> Script:
        if self._watches.get(watch.name) is not watch:
            return
        try:
            found: SemaphoreDescription = yield Describe(watch.name, owners=watch.owners)
        except TenureError:
            data = owners = True  # it is gone; or else the client will look itself
        else:
            now = _state(found)
            data = watch.data and now[0] != watch.seen[0]
            owners = watch.owners and now[1] != watch.seen[1]
        if data or owners:
            self._drop(watch)
            self.replies.append(answers.changed(watch.asked, data=data, owners=owners))

    def _drop(self, watch: _Watch) -> None:
        watch.stop()
        self._changed.pop(watch, None)
        if self._watches.get(watch.name) is watch:
            del self._watches[watch.name]


def _seconds(ask: Any) -> float | None:
    """How long an acquire waits."""
    timeout: int = ask.timeout_millis
    return None if timeout == FOREVER else timeout / 1000
