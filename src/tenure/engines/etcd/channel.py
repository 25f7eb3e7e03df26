"""Channel to one member: a connection, made when it is needed, and the calls on it.

A channel is idle, connecting, connected, or closed. A call that finds it idle has it connect, and
waits with all that come meanwhile; after a connection that did not come about it is idle again, and
for a moment (`_FIRST_PAUSE`, growing to `_LONGEST_PAUSE`) calls fail at once with the reason.

Rules:

* The channel owns the task that connects, and its links; `aclose` ends them, and fails all calls.
* Only the link touches the transport. What is said in one turn of the loop is written in one
  piece, unless there is little.
* Output waits in the transport if the member does not read; its size is bounded by the number of
  callers, which wait for their answers.
* A call is bounded by its own deadline. One whose caller is cancelled, or whose time is over, is
  reset, which no other call notices. A call that was surely not carried out because the member is
  leaving is made once more, on another connection.
* A member that has said nothing for `_SILENCE`, though there are calls, is asked for a sign of
  life, and left when none comes. etcd allows that once in five seconds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from functools import partial
from typing import TypeAlias, cast

from tenure.background import Failures
from tenure.engines.etcd.calls import CallFailed, GrpcCall, StreamCall, UnaryCall
from tenure.engines.etcd.frames import head
from tenure.engines.etcd.http2 import Http2Connection

__all__ = ["Channel", "Metadata"]

_log = logging.getLogger("tenure")
_failures = Failures("looking after a connection", _log)

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_CONNECTING = 3.0
"""Seconds in which a member has to accept a connection, and to say what it allows."""
_SILENCE, _SIGN_OF_LIFE = 10.0, 3.0
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.1, 1.0, 1.6
_FEW = 3
_PONG = 0.05
"""Seconds in which a ping is answered. The servers of gRPC in Go measure the way with one at each
request, while none of theirs is unanswered; what they learn is meant for large requests."""
_CLOSING = 1.0
_MOST_HEADS = 64

_OURS = (("content-type", "application/grpc"), ("te", "trailers"), ("user-agent", "tenure"))


class _Link(asyncio.Protocol):
    """One connection.

    Attributes:
        ready: done when the member has said what it allows, or why it will not.
        gone: done when the transport is closed.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pong: asyncio.TimerHandle | None = None
        self._why = ""
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.connection = Http2Connection(self._speak)

    @property
    def connected(self) -> bool:
        """True while there is a transport."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit it
        secure: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != "h2":
            self.end("it does not speak HTTP/2")
            return
        self._listen()
        self._write()

    # Writing

    def begin(self, call: GrpcCall) -> None:
        """Make a call; what it says is written at once if hardly anything else is under way."""
        at_once = not self.connection.awaited and len(self.connection.streams) < _FEW
        self.connection.awaited |= at_once
        self.connection.begin(call)
        if at_once:
            self._write()
        if self.connection.draining:  # that was the last one
            self._channel.retire(self)

    def _speak(self) -> None:
        self._loop.call_soon(self._write)

    def _write(self) -> None:
        connection = self.connection
        if connection.out and self._transport is not None:
            self._transport.write(connection.take())
        connection.awaited = False

    # Reading

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        connection = self.connection
        is_awaited, connection.awaited = connection.awaited, True
        connection.receive(data)
        if connection.owed and self._pong is None:
            self._pong = self._loop.call_later(_PONG, self._answer_pings)
        if not is_awaited:
            self._speak()  # after the callers that were waiting for this
        if connection.ready and not self.ready.done():
            self.ready.set_result(None)
        if connection.draining:
            self._channel.retire(self)
            if not connection.streams:
                self.end(connection.over or "the member is leaving")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        for timer in (self._timer, self._pong):
            if timer is not None:
                timer.cancel()
        why = self._why or (str(error) if error else "the member closed the connection")
        self.connection.fail(why)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self.connection.over))
            self.ready.exception()  # perhaps there is no waiter any more
        if not self.gone.done():
            self.gone.set_result(None)
        self._channel.gone(self)

    def _answer_pings(self) -> None:
        self._pong = None
        self.connection.pong()

    # Whether it is alive

    def _listen(self) -> None:
        self._timer = self._loop.call_later(_SILENCE, self._look)

    def _look(self) -> None:
        try:
            self._look_for_silence()
        except Exception as error:  # the next connection is looked after anew
            _failures.report(error)
            self.end(f"it could not be looked after: {error!r}")

    def _look_for_silence(self) -> None:
        silent_for = self._loop.time() - self._heard_at
        if not self.connection.streams and self.connection.draining:
            self.end("it has done all that it could")
        elif not self.connection.streams:
            self._listen()
        elif silent_for < _SILENCE:
            self._timer = self._loop.call_later(_SILENCE - silent_for, self._look)
        else:
            self.connection.ping()
            self._timer = self._loop.call_later(_SIGN_OF_LIFE, self._look_again, self._heard_at)

    def _look_again(self, heard_at: float) -> None:
        if self._heard_at == heard_at:
            self.end("the member gives no sign of life")
            if self._transport is not None:
                self._transport.abort()  # it would wait until all is written
        else:
            self._listen()

    # Leaving

    def end(self, why: str) -> None:
        """Leave; what is under way fails. Safe to call twice."""
        self._why = self._why or why
        self._channel.retire(self)
        self.connection.close(self._why)
        if self._transport is not None:
            self._write()
            self._transport.close()

    async def aclose(self, why: str) -> None:
        """Leave, and wait until it is done. Safe to call twice."""
        self.end(why)
        if self._transport is not None:
            await asyncio.wait([self.gone], timeout=_CLOSING)
        if self._transport is not None:
            self._transport.abort()
            await asyncio.wait([self.gone])


class Channel:
    """Channel to one member.

    Args:
        endpoint: ``host:port``.
        secrets: for TLS.
        server_name: what the member's certificate calls it, if not by its host.
    """

    def __init__(
        self, endpoint: str, secrets: ssl.SSLContext | None = None, server_name: str = ""
    ) -> None:
        """Prepare the channel; the first call connects."""
        host, _, port = endpoint.rpartition(":")
        self.endpoint = endpoint
        self._host, self._port = host.strip("[]"), int(port)
        self._secrets = secrets
        self._server_name = server_name or self._host
        self._authority = server_name or endpoint
        self._heads: dict[tuple[str, Metadata], bytes] = {}
        self._link: _Link | None = None
        self._links: set[_Link] = set()
        self._connecting: asyncio.Task[str] | None = None
        self._waiting: list[GrpcCall] = []
        self._pause = 0.0
        self._not_before = 0.0
        self._trouble = ""
        self._closed = False

    async def aclose(self) -> None:
        """Leave; calls that are under way fail. Safe to call twice."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])  # its waiters are notified of that first
        for link in list(self._links):
            await link.aclose("the channel was closed")

    # Calls

    async def call(
        self, method: str, request: bytes, timeout: float, metadata: Metadata = ()
    ) -> bytes:
        """Send a request and return its answer.

        Raises:
            CallFailed
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        for is_last in (False, True):
            question = UnaryCall(self._head(method, metadata), request, loop.create_future())
            timer = loop.call_at(until, question.give_up)
            try:
                self._begin(question)
                return await question.answer
            except CallFailed as failed:
                if is_last or not failed.again:
                    raise
            except BaseException:
                question.cancel()
                raise
            finally:
                timer.cancel()
        raise AssertionError

    def converse(self, method: str, metadata: Metadata = ()) -> StreamCall:
        """Begin a call of messages both ways. The caller cancels it at the end."""
        conversation = StreamCall(self._head(method, metadata))
        self._begin(conversation)
        return conversation

    def _head(self, method: str, metadata: Metadata) -> bytes:
        found = self._heads.get((method, metadata))
        if found is None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()  # tokens come and go
            secure = self._secrets is not None
            found = head(method, self._authority, secure=secure, more=(*_OURS, *metadata))
            self._heads[method, metadata] = found
        return found

    def _begin(self, call: GrpcCall) -> None:
        if self._link is not None:
            self._link.begin(call)
        elif self._closed:
            call.lost("the channel was closed", again=False)
        elif self._connecting is not None:
            self._waiting.append(call)
        else:
            loop = asyncio.get_running_loop()
            if loop.time() < self._not_before:
                call.lost(self._trouble, again=False)
            else:
                self._waiting.append(call)
                link = _Link(self, loop)
                self._connecting = loop.create_task(self._connect(link), name="tenure-etcd-connect")
                self._connecting.add_done_callback(partial(self._connected, link))

    # The connection

    async def _connect(self, link: _Link) -> str:
        """Make a connection; return the cause of a failure, or an empty string."""
        self._links.add(link)
        try:
            async with asyncio.timeout(_CONNECTING):
                await asyncio.get_running_loop().create_connection(
                    *(lambda: link, self._host, self._port),
                    ssl=self._secrets,
                    server_hostname=None if self._secrets is None else self._server_name,
                )
                await link.ready
        except OSError as error:  # a timeout is one, too
            return str(error) or "no answer"
        return ""

    def _connected(self, link: _Link, connecting: asyncio.Task[str]) -> None:
        """Pass a new connection, or the reason for none, to the calls that wait for it."""
        self._connecting = None
        why = "it was closed" if connecting.cancelled() else connecting.result()
        why = why or link.connection.over or ("it is leaving" if link.connection.draining else "")
        waiting, self._waiting = self._waiting, []
        if not why:
            self._link, self._pause = link, 0.0
            for call in waiting:
                if not call.over:
                    link.begin(call)
            return
        self._pause = min(max(self._pause * _GROWTH, _FIRST_PAUSE), _LONGEST_PAUSE)
        now = connecting.get_loop().time()
        self._not_before = now + self._pause * random.uniform(0.8, 1.2)
        self._trouble = f"{self.endpoint} cannot be reached: {why}"
        if link.connected:
            link.end(self._trouble)
        else:
            self._links.discard(link)
        for call in waiting:
            call.lost(self._trouble, again=False)

    def retire(self, link: _Link) -> None:
        """Nothing new begins on a connection."""
        if self._link is link:
            self._link = None

    def gone(self, link: _Link) -> None:
        """A connection is closed."""
        self.retire(link)
        self._links.discard(link)
