"""Connection to a PostgreSQL server, over libpq in pipeline mode.

Rules:

* psycopg opens the connection. After that only this class touches the socket, so that a statement
  costs one write and one read, without a task.
* Each statement is a transaction, and is answered when that is committed. `pipeline` decides which
  ones are under way together. A program that does one thing at a time waits for no iteration of the
  loop.
* A statement that the database has rolled back for a reason that passes (a deadlock, a full disk,
  a timeout that an administrator has set) is sent again after a pause, before all others. One that
  a transaction of the user's holds up is sent again later, behind others.
* Behind a pooler one statement is under way at a time, and a reply without its mark ends the
  connection (`connecting`).
* A batch that the database refuses, or that takes it too long, is sent again in halves, until one
  operation is left: only this one fails or waits.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from functools import partial
from typing import Any, Protocol

import psycopg
from psycopg import pq

from tenure.busy_poll import BusyPoll
from tenure.engines._kit.commands.pipeline import MOST, Operation, Statement, StatementPipeline
from tenure.engines._kit.reconnect import backoff
from tenure.engines.postgresql.batch import Batch
from tenure.engines.postgresql.connecting import MIXED_UP, StatementSender
from tenure.engines.postgresql.statements import Refusal
from tenure.engines.postgresql.url import cause

_log = logging.getLogger("tenure")

_AT_ONCE = frozenset({"TN001", "40001", "40P01"})
_NOT_PREPARED = "26000"
_LATER = frozenset({"55P03", "57014"})
_FULL = ("53", "58")  # classes: insufficient resources, errors of the system
_NO_SUCH_CHARACTER = frozenset({"22021", "22P05"})
_GUARDED = "TN003"
_GUARDED_PAUSE = 0.05
_UNSERVED = ("08", "25006", "55000", "57P", "3F000", "42P01", "42883", "TN004")
"""Beginnings of the codes of a server that cannot serve now (see the kit's `reconnect`).

It cannot be reached by its pooler, is read-only, in recovery, being shut down, without the store,
or has transactions of another isolation level.
"""
_ENDING = frozenset({"FATAL", "PANIC"})
"""Severities after which the server, or a pooler, closes the connection."""


class PostgresConnectionOwner(Protocol):
    """Receiver of what a connection reports."""

    def pushed(self, channel: str, event: str) -> None:
        """Handle a notification."""

    def disconnected(self, connection: PostgresConnection, why: str) -> None:
        """Handle the end of the connection."""

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""

    def new_batch(self) -> Batch:
        """Return an empty batch."""
        ...

    def expire(self, sessions: list[int]) -> Statement:
        """Return the statement that ends sessions which have expired."""
        ...


class PostgresConnection:
    """One connection.

    Attributes:
        over: it has ended.
        trouble: what keeps the statement under way from completing, or empty.
        listener: the connection that receives notifications, this one or another one, which ends
            with this one; ``None`` behind a pooler.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        owner: PostgresConnectionOwner,
        schema: str,
        busy_poll: float,
        *,
        pooled: bool = False,
    ) -> None:
        """Use an open connection of psycopg's from now on; `pooled` is one to a pooler."""
        self.over = False
        self.trouble = ""
        self._psycopg = connection  # closes the socket when it is collected
        self._parting: list[str] = []  # the server's reason for ending an idle connection
        connection.add_notice_handler(partial(_note_parting, self._parting))
        self._pq = connection.pgconn
        self._pq.nonblocking = 1
        self._pq.enter_pipeline_mode()
        self._sender = StatementSender(self._pq, pooled=pooled)
        self.listener: PostgresConnection | None = None
        self._schema = schema
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._poll = BusyPoll(self._loop.call_soon, busy_poll)
        self._socket = self._pq.socket
        self._pipeline = StatementPipeline(owner.new_batch, 1 if pooled else MOST)
        self._preparing: deque[bool] = deque()  # for each statement under way
        self._result: Any = None  # of the first statement under way
        self._since = 0.0  # since when the server executes it
        self._alone = True
        self._flushing = self._writing = False
        self._pause: asyncio.TimerHandle | None = None
        self._failures = 0
        self._loop.add_reader(self._socket, self._readable)

    # Sending

    def send(self, statement: Statement) -> None:
        """Send a statement, after those before it."""
        self._pipeline.add(statement)
        self._send()

    def operate(self, operation: Operation[Any]) -> None:
        """Send an operation, with others that are called for before it can be sent."""
        pipeline = self._pipeline
        if self.trouble and pipeline.drop(operation):
            return
        alone = self._alone and not pipeline.waits
        pipeline.operate(operation)
        if pipeline.under_way or self._pause is not None:
            self._alone = False
        elif alone:
            self._send()  # waiting for others would gain nothing
            return
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._pipeline.waits and not self._pipeline.under_way:
            self._alone = True
        self._send()

    def _send(self) -> None:
        """Send what may be under way."""
        if self._pause is not None:
            return
        sent = False
        while not self.over and (statement := self._pipeline.begin()):
            if len(self._pipeline.under_way) == 1:
                self._since = self._loop.time()
                self._result = None
            try:
                sql, parameters = statement.packed(self._schema)
            except Exception as error:  # nothing was sent
                self._pipeline.withdraw()
                if parts := statement.parts():
                    self._pipeline.put_first(parts)
                else:
                    statement.answered(Refusal("", f"it cannot be sent: {error!r}"))
                continue
            try:
                self._preparing.append(self._sender.send(sql, parameters, recurs=statement.recurs))
            except psycopg.OperationalError as error:
                self._failed(error)
                return
            sent = True
        if sent:
            self._write()
            self._poll.expect()

    def _write(self) -> None:
        try:
            more = self._pq.flush()
        except psycopg.OperationalError as error:
            self._failed(error)
            return
        if bool(more) != self._writing:
            self._writing = bool(more)
            if more:
                self._loop.add_writer(self._socket, self._write)
            else:
                self._loop.remove_writer(self._socket)

    @property
    def silent_for(self) -> float:
        """Seconds for which a statement has had no answer, and is not known to be executed."""
        return self._loop.time() - self._since if self._pipeline.under_way else 0.0

    @property
    def backend(self) -> int:
        """Number of the server's process; 0 behind a pooler, which makes one up."""
        return self._pq.backend_pid if self.listener is self and not self.over else 0

    def note_blocked(self, waits_for: str) -> None:
        """Note that the server executes the statement under way, and what that waits for."""
        if self._pipeline.under_way:
            self._since = self._loop.time()
            self.trouble = f"does not complete a statement, which waits for {waits_for}"

    # Receiving

    def _readable(self) -> None:
        if self.over:
            return
        connection = self._pq
        try:
            connection.consume_input()
            while self._preparing and not connection.is_busy():
                self._received(connection.get_result())
            while not self.over and (note := connection.notifies()):
                self._owner.pushed(note.relname.decode(), note.extra.decode())
        except psycopg.OperationalError as error:
            self._failed(error)
        except BaseException:  # of a reply's receiver
            self._loop.call_soon(self._readable)  # more may have arrived, and been read
            raise

    def _received(self, result: Any) -> None:
        """Handle a result of the first statement under way; ``None`` is the end of a command."""
        if result is None:
            if self._pq.status == pq.ConnStatus.BAD:
                raise psycopg.OperationalError("the server closed the connection")
        elif result.status == pq.ExecStatus.PIPELINE_SYNC:  # it is committed
            failed = self._result is not None and self._result.status == pq.ExecStatus.FATAL_ERROR
            if failed or self._sender.is_reply(self._result):
                self._complete()
            else:
                self._end(MIXED_UP)
        elif result.status == pq.ExecStatus.FATAL_ERROR:
            self._result = result
            if _severity(result) in _ENDING:
                self._end(_field(result, pq.DiagnosticField.MESSAGE_PRIMARY))
        elif result.status != pq.ExecStatus.PIPELINE_ABORTED:
            self._result = result

    def _complete(self) -> None:
        statement, result = self._pipeline.end(), self._result
        preparing = self._preparing.popleft()
        self._result = None
        self._poll.came(more=bool(self._preparing))
        if self._preparing:
            self._since = self._loop.time()
        if result.status == pq.ExecStatus.FATAL_ERROR:
            if preparing:
                self._sender.forget()
            self._refused(statement, result)
            return
        reply = result.get_value(0, 0) if result.ntuples else None
        answer = None if not reply else json.loads(reply)
        if isinstance(answer, dict) and "expired" in answer:  # the batch has not begun
            statement.judged()
            self._pipeline.put_first((self._owner.expire(answer["expired"]), statement))
            self._send()
            return
        self._failures = 0
        self.trouble = ""
        if not self._pipeline.under_way:
            self._send()  # so that the server is not idle while the reply is handled
        try:
            statement.answered(answer)
        finally:
            if self._pipeline.waits or not self._alone:
                self._send_soon()  # after the callers, who may call for more

    def _refused(self, statement: Statement, result: Any) -> None:
        code = _field(result, pq.DiagnosticField.SQLSTATE)
        message = _field(result, pq.DiagnosticField.MESSAGE_PRIMARY)
        if code in _NO_SUCH_CHARACTER:
            message = (
                "the encoding of the database lacks a character. Create a database with "
                "ENCODING 'UTF8'"
            )
        if code.startswith(_UNSERVED):
            self._pipeline.put_first((statement,))
            self._end(message)
        elif code == _GUARDED:
            self._loop.call_later(_GUARDED_PAUSE, self._owner.send, statement)
            self._send()
        elif code == _NOT_PREPARED:
            self._sender.forget()
            self._pipeline.put_first((statement,))
            self._send()
        elif code in _AT_ONCE or code in _LATER or code.startswith(_FULL):
            self._failures += 1
            if code not in _AT_ONCE or self._failures > 3:
                self.trouble = f"refuses to commit: {message}"
            statement.rolled_back()
            parts = statement.parts() if code in _LATER else []  # which take less time
            self._pipeline.put_first(parts or (statement,))
            at_once = parts or (code in _AT_ONCE and self._failures < 3)
            pause = 0.0 if at_once else backoff(self._failures)
            if self._pause is None:
                self._pause = self._loop.call_later(pause, self._retry)
        elif parts := statement.parts():  # one operation does not fail the others
            statement.rolled_back()
            self._pipeline.put_first(parts)
            self._send()
        else:
            statement.answered(Refusal(code, message))
            self._send_soon()

    def _retry(self) -> None:
        self._pause = None
        self._send()

    # The end

    def drop(self, why: str) -> None:
        """Drop the connection; its owner is notified soon. Safe to call twice."""
        self._end(why)

    def _end(self, why: str) -> None:
        if self.over:
            return
        self.over = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._pq.finish()
        if self.listener is not None and self.listener is not self:
            self.listener.drop(why)
        self._preparing.clear()
        # Later, so that a caller who sends several statements need not expect it in between.
        self._loop.call_soon(self._owner.disconnected, self, " ".join(why.split()))

    def _failed(self, error: psycopg.Error) -> None:
        """End because of an error of libpq's, for the server's reason if that has arrived."""
        result = None if self._pq.is_busy() else self._pq.get_result()
        if result is not None and _severity(result) in _ENDING:
            self._end(_field(result, pq.DiagnosticField.MESSAGE_PRIMARY))
        else:
            self._end(next(iter(self._parting), "") or cause(error))

    def take_unanswered(self) -> list[Statement]:
        """Return the statements that the next connection is to send."""
        return [each for each in self._pipeline.take_all() if each.lost()]


def _note_parting(parting: list[str], notice: psycopg.errors.Diagnostic) -> None:
    if (notice.severity_nonlocalized or notice.severity) in _ENDING:
        parting.append(notice.message_primary or "")


def _severity(result: Any) -> str:
    found = _field(result, pq.DiagnosticField.SEVERITY_NONLOCALIZED)
    return found or _field(result, pq.DiagnosticField.SEVERITY)  # PgBouncer's, not translated


def _field(result: Any, field: pq.DiagnosticField) -> str:
    return (result.error_field(field) or b"").decode()
