"""A session's conversation, from SessionStarted on, without I/O: messages in, messages out.

The driver of a `Conversation` passes to it the client's messages (`received`), the store's answers
(`answered`, `refused`) and its events (`granted`, `removed`, `ended`). After each of these it sends
the messages in `replies`, in order, and carries out the `operations`. Rules:

* **One operation at a time for each name.** Operations on one semaphore are carried out in the
  order of their requests, each after the previous one was answered; different names do not wait for
  each other. So the state of a request does not change between two steps of a script.
* **Replies keep the order of the requests**, also where their names differ (`Turns`).
* **Pushes wait meanwhile.** A grant or a removal is recorded, and sent after the reply to the
  current operation. Changes of watched semaphores are sent last: first the requester's reply, then
  results of waiting requests, then Changed.
* **One answer for each request**, and one Changed for each watch.
* **A pong is a proof.** It is sent only after the store has extended the session's expiry in answer
  to a command that was sent after the client's ping arrived.
* After a Failure or SessionStopped (`over`) nothing more is sent.

**Turns** (`Turns`) keep replies in the order of their requests, over all names. Requests for
different names are carried out concurrently, but YDB answers all requests of a session in order. A
reply that is ready too early waits here for those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tenure.engines.contract import Removal
from tenure.errors import InvalidArgument, TenureError
from tenure.model import Recovered, SemaphoreDescription
from tenure.server.auth.accounts import Account
from tenure.server.limits import Limits
from tenure.server.semaphores import SemaphoreCounts
from tenure.server.ydb import requests
from tenure.server.ydb.long_replies import LongReplies
from tenure.server.ydb.messages import Response, Status, failure, status_of
from tenure.server.ydb.operations import (
    Answered,
    CreateOperation,
    DeleteOperation,
    DescribeOperation,
    Operation,
    Script,
    Settled,
    StartWatch,
    UpdateOperation,
    no_semaphore,
    what_is_wrong,
)
from tenure.server.ydb.requests import ConversationRequests
from tenure.server.ydb.watches import OneTimeWatches


class Turn:
    """One request's script, and its replies while an earlier request is unanswered.

    Attributes:
        name: the semaphore of the request.
        script: the remaining steps; ``None`` when the request is answered.
        replies: the waiting replies.
        parked: whether the script waits until every earlier request is answered.
    """

    __slots__ = ("name", "parked", "replies", "script")

    def __init__(self, name: str, script: Script | None) -> None:
        self.name = name
        self.script = script
        self.replies: list[Any] = []
        self.parked = False


class Turns:
    """Unanswered requests of a session, and those whose replies wait for earlier ones.

    Args:
        replies: the messages to send, in order.

    Attributes:
        produced: replies of a running script, taken by `collect`.
    """

    def __init__(self, replies: list[Any]) -> None:
        """Start without requests; replies go to `replies`."""
        self.produced: list[Any] = []
        self._replies = replies
        self._open: deque[Turn] = deque()

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._open)

    def open(self, turn: Turn) -> None:
        """Append a new request."""
        self._open.append(turn)

    def is_first(self, turn: Turn) -> bool:
        """Return true if every earlier request is answered."""
        return self._open[0] is turn

    def collect(self, turn: Turn) -> None:
        """Take the replies of the script of `turn`."""
        if self.produced:
            (self._replies if self._open[0] is turn else turn.replies).extend(self.produced)
            self.produced.clear()

    def collect_push(self) -> None:
        """Append replies to an event of the store: they come after all others."""
        if not self.produced:
            return
        if not self._open:
            self._replies.extend(self.produced)
        else:
            if self._open[-1].script is not None:
                self._open.append(Turn("", None))
            self._open[-1].replies.extend(self.produced)
        self.produced.clear()

    def finish(self, turn: Turn) -> Turn | None:
        """Record that a request is answered; return a parked one that may continue, if any."""
        turn.script = None
        pending = self._open
        if pending[0] is not turn:
            return None
        pending.popleft()
        while pending:
            first = pending[0]
            self._replies.extend(first.replies)
            first.replies.clear()
            if first.script is not None:
                unparked, first.parked = first.parked, False
                return first if unparked else None
            pending.popleft()
        return None

    def clear(self) -> None:
        """Drop everything: nothing more is sent."""
        self._open.clear()
        self.produced.clear()


# Pongs for a client that pings faster than its store answers; then the oldest is dropped.
_PONGS_OWED = 16


class Job:
    """An operation to carry out, and the turn that then continues."""

    __slots__ = ("operation", "turn")

    def __init__(self, operation: Operation, turn: Turn) -> None:
        self.operation = operation
        self.turn = turn


class Conversation:
    """Protocol of one stream.

    Args:
        node: the path of the session's node.
        limits: the limits of the client.
        semaphores: counts its requests.
        start_watch: starts a watch.
        look: called when a change was recorded; the caller then calls `report_changes` soon.
        timeouts: timeouts of waiters, by session and name; shared by all conversations.
        long_replies: the long descriptions that are being sent; shared as well.
        account: the account of its requests.

    Attributes:
        replies: the messages to send, in order.
        operations: the operations to carry out, in order.
        renew: whether the session must be renewed in the store, because the client has sent
            something.
        stopped: whether the client has requested the session's end.
        over: whether a Failure or SessionStopped was sent.
    """

    def __init__(
        self,
        node: str,
        limits: Limits,
        semaphores: SemaphoreCounts,
        start_watch: StartWatch,
        look: Callable[[], None],
        timeouts: dict[tuple[int, str], int] | None = None,
        long_replies: LongReplies | None = None,
        account: Account | None = None,
    ) -> None:
        self.replies: list[Any] = []
        self.operations: deque[Job] = deque()
        self.renew = False
        self.stopped = False
        self.over = False
        self._node = node
        self._number = 0
        self._limits = limits
        self._look = look
        self._turns = Turns(self.replies)
        produced = self._produced = self._turns.produced
        timeouts = {} if timeouts is None else timeouts
        self._requests = ConversationRequests(node, limits, semaphores, account, produced, timeouts)
        long_replies = LongReplies() if long_replies is None else long_replies
        self._watches = OneTimeWatches(limits, start_watch, look, produced, timeouts, long_replies)
        self._busy: dict[str, deque[Turn]] = {}
        self._ready: deque[Turn] = deque()
        self._unsettled: dict[str, Turn] = {}
        self._outstanding = 0
        self._pongs: deque[tuple[float, int]] = deque(maxlen=_PONGS_OWED)
        self._scripts: dict[str, Callable[[Any], Script]] = {
            "acquire_semaphore": self._requests.acquire,
            "release_semaphore": self._requests.release,
            "describe_semaphore": self._watches.describe,
            "create_semaphore": self._create,
            "update_semaphore": self._update,
            "delete_semaphore": self._delete,
        }

    # Input of the driver

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Register requests that the session already has; of several for a name, the first."""
        self._requests.resumed(requests)

    def started(self, number: int, timeout_millis: int, first_id: int, opaque: int) -> None:
        """Answer that the session is attached, and ping.

        Args:
            number: the session's id.
            timeout_millis: its recovery window.
            first_id: the first unused request id of the session.
            opaque: the number in the ping.
        """
        self._number = self._requests.session_id = number
        self._requests.next_id = first_id
        if self.over:
            return  # it was taken over, or has ended, while it was being attached
        started = Response.SessionStarted(session_id=number, timeout_millis=timeout_millis)
        self.replies.append(Response(session_started=started))
        self.tick(opaque)

    @property
    def unanswered(self) -> int:
        """Number of unanswered requests."""
        return len(self._turns)

    @property
    def waits_for_pong(self) -> bool:
        """True while a ping is unanswered."""
        return self._outstanding != 0

    def tick(self, opaque: int) -> None:
        """Send a ping with `opaque`; the previous one must have been answered."""
        if self.over:
            return
        if self._outstanding:
            self.fail(Status.TIMEOUT, "the client has not answered a ping in time")
            return
        self._outstanding = opaque
        self.replies.append(Response(ping=Response.PingPong(opaque=opaque)))

    def received(self, request: Any, now: float) -> None:
        """Process a request of the client, which arrived at `now`."""
        if self.over:
            return
        kind = request.WhichOneof("request")
        script = self._scripts.get(kind) if kind else None
        if script is not None:
            message = getattr(request, kind)
            self._enter(message.name, script(message))
        elif kind == "ping":
            self._answers_ping(request.ping.opaque)
            self._pongs.append((now, request.ping.opaque))
            self.renew = True
        elif kind == "pong":
            if not self._outstanding:
                return  # it answers no ping, and proves nothing
            if not self._answers_ping(request.pong.opaque):
                self.fail(Status.BAD_REQUEST, "a pong that does not answer the ping")
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
        """Record that the store has extended the session's expiry after a renewal sent at `at`."""
        while self._pongs and self._pongs[0][0] <= at and not self.over:
            _, opaque = self._pongs.popleft()
            self.replies.append(Response(pong=Response.PingPong(opaque=opaque)))

    def answered(self, job: Job, outcome: Any) -> None:
        """Continue after an operation that was carried out."""
        if not self.over:
            self._go_on(job.turn, outcome, None)

    def refused(self, job: Job, error: TenureError) -> None:
        """Continue after an operation that failed."""
        if not self.over:
            self._go_on(job.turn, None, error)

    def granted(self, request_id: int) -> None:
        """Record that a waiting request owns its tokens."""
        self._pushed(self._requests.granted(request_id))

    def removed(self, request_id: int, why: Removal) -> None:
        """Record that a request has left its queue without a release by the client."""
        self._pushed(self._requests.removed(request_id, why))

    def _pushed(self, name: str | None) -> None:
        """Report an event of the store about the session's request for a name."""
        if name is None:
            return
        if name not in self._busy:
            self._requests.report(name)
            self._turns.collect_push()
        elif (turn := self._unsettled.pop(name, None)) is not None:
            self._go_on(turn, None, None)

    def report_changes(self) -> None:
        """Report changes of watched names without a running operation."""
        for watch in [watch for watch in self._watches.noted if watch.name not in self._busy]:
            del self._watches.noted[watch]
            self._enter(watch.name, self._watches.report_change(watch))

    def closed(self) -> None:
        """Record that the session that the client stopped has ended."""
        stopped = Response.SessionStopped(session_id=self._number)
        self.replies.append(Response(session_stopped=stopped))

    def fail(self, status: int, text: str) -> None:
        """Report that it cannot continue, as the last message."""
        if not self.over:
            self.replies.append(failure(status, text))
            self._end()

    def leave(self) -> None:
        """End all watches and counts: the stream has ended. Safe to call twice."""
        self._end()

    def _end(self) -> None:
        self.over = True
        self.operations.clear()
        self._turns.clear()
        self._ready.clear()
        self._unsettled.clear()
        self._watches.stop_all()
        self._requests.forget_all()

    def _answers_ping(self, opaque: int) -> bool:
        """Record a number of the client; return true if it answers the outstanding ping."""
        answers_it = opaque != 0 and opaque == self._outstanding
        if answers_it:
            self._outstanding = 0
        return answers_it

    # One operation at a time for each name

    def _enter(self, name: str, script: Script) -> None:
        turn = Turn(name, script)
        self._turns.open(turn)
        queue = self._busy.get(name)
        if queue is None:
            self._busy[name] = deque()
            self._go_on(turn, None, None)
        else:
            queue.append(turn)

    def _go_on(self, turn: Turn, outcome: Any, error: TenureError | None) -> None:
        """Let a script take its next step, and then scripts that waited for it."""
        self._step(turn, outcome, error)
        while self._ready:
            self._step(self._ready.popleft(), None, None)

    def _step(self, turn: Turn, outcome: Any, error: TenureError | None) -> None:
        """Run a script until it needs an answer; settle its name when it has ended."""
        script = turn.script
        assert script is not None
        while True:
            try:
                needed = script.send(outcome) if error is None else script.throw(error)
            except StopIteration:
                self._ended(turn)
                return
            self._turns.collect(turn)
            outcome = error = None
            if isinstance(needed, Settled):
                if not self._requests.is_settled(needed.name):
                    self._unsettled[needed.name] = turn
                    return
            elif isinstance(needed, Answered):
                if not self._turns.is_first(turn):
                    turn.parked = True
                    return
            else:
                self.operations.append(Job(needed, turn))
                return

    def _ended(self, turn: Turn) -> None:
        name = turn.name
        self._requests.report(name)
        self._turns.collect(turn)
        if (first := self._turns.finish(turn)) is not None:
            self._ready.append(first)
        if queue := self._busy[name]:
            self._ready.append(queue.popleft())
            return
        del self._busy[name]
        if self._watches.noted:
            self._look()

    # Scripts of semaphores

    def _create(self, message: Any) -> Script:
        text = what_is_wrong(message.name, message.data, self._node, self._limits)
        if not text and message.limit == 0:
            text = "a limit is at least 1"
        if text:
            self._produced.append(requests.created(message.req_id, Status.BAD_REQUEST, text))
            return
        try:
            yield CreateOperation(message.name, message.limit, message.data)
        # An ephemeral one exists: everything else has been checked.
        except InvalidArgument as error:
            self._produced.append(
                requests.created(message.req_id, Status.PRECONDITION_FAILED, str(error))
            )
        except TenureError as error:
            self._produced.append(requests.created(message.req_id, status_of(error), str(error)))
        else:
            self._produced.append(requests.created(message.req_id))

    def _update(self, message: Any) -> Script:
        text = what_is_wrong(message.name, message.data, self._node, self._limits)
        if text and message.name:  # the empty name does not exist
            self._produced.append(requests.updated(message.req_id, Status.BAD_REQUEST, text))
            return
        if text := no_semaphore(message.name):
            self._produced.append(requests.updated(message.req_id, Status.NOT_FOUND, text))
            return
        try:
            yield UpdateOperation(message.name, message.data)
        except TenureError as error:
            self._produced.append(requests.updated(message.req_id, status_of(error), str(error)))
        else:
            self._produced.append(requests.updated(message.req_id))

    def _delete(self, message: Any) -> Script:
        if text := no_semaphore(message.name):
            self._produced.append(requests.deleted(message.req_id, Status.NOT_FOUND, text))
            return
        try:
            found: SemaphoreDescription = yield DescribeOperation(message.name)
            if found.ephemeral:
                text = f"{message.name!r} is ephemeral: it disappears with its last request"
                self._produced.append(
                    requests.deleted(message.req_id, Status.PRECONDITION_FAILED, text)
                )
                return
            yield DeleteOperation(message.name, message.force)
        except TenureError as error:
            self._produced.append(requests.deleted(message.req_id, status_of(error), str(error)))
            return
        self._requests.deleted(message.name)
        self._watches.deleted(message.name)
        self._produced.append(requests.deleted(message.req_id))
