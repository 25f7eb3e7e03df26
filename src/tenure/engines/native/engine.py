"""Engine of tenure's own server, or of several servers on one store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from tenure.background import Ending
from tenure.clock import Clock
from tenure.core import refusals, rules
from tenure.engines.contract import (
    Attach,
    EngineDefaults,
    GuardStatement,
    Orphan,
    RateAnswer,
    RateCall,
    SessionEvents,
)
from tenure.engines.native.attachment import STORE_LOST, closing_again
from tenure.engines.native.calls import ConnectionGone, NativeCall
from tenure.engines.native.heartbeat import NativeHeartbeat
from tenure.engines.native.reconnector import Dial, NativeReconnector, dialler
from tenure.engines.native.session import NativeSession, plain_name, plain_path
from tenure.engines.native.url import NativeUrl
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)
from tenure.wire import messages as wire
from tenure.wire.values import Config

_CLOSING = 5.0
"""Seconds for a server to close the sessions of an engine that is closed."""


class _OlderServer(Exception):
    """Error: the server lacks a feature. It never leaves this module."""


class NativePages:
    """Lists in pages, read by the server (`Pages`).

    Args:
        read: sends a message of the feature `PAGES`, and returns its answer.
    """

    def __init__(self, read: Callable[..., Awaitable[Any]]) -> None:
        self._read = read

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node, by id."""
        found: list[SessionDescription] = await self._read(
            wire.ReadSessions, plain_path(path), after, most
        )
        return found

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores, sorted."""
        found: list[str] = await self._read(wire.ReadNames, plain_path(path), after, most)
        return found

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node, by name."""
        found: list[SemaphoreDescription] = await self._read(
            wire.ReadSemaphores, plain_path(path), bool(owners), bool(waiters), after, most
        )
        return found

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Return the next owners or waiters of a semaphore, by order id."""
        path = plain_path(path)
        found: list[RequestDescription] = await self._read(
            wire.ReadRequests, path, plain_name(name, path), bool(waiters), after, most
        )
        return found


class NativeEngine(EngineDefaults):
    """A connection to tenure's own server.

    Args:
        dial: connects to a server, if that is not over a network.

    Attributes:
        capabilities: the capabilities of the server's store; before the greeting, the possible
            ones.
    """

    def __init__(self, address: NativeUrl, clock: Clock, dial: Dial | None = None) -> None:
        """Prepare the engine; `open` connects."""
        self.url = address.url
        self.clock = clock
        self.capabilities = Capabilities(resume=True, rates=True)
        self._address = address
        self._dial = dial
        self._reconnector: NativeReconnector | None = None
        self._heartbeat: NativeHeartbeat | None = None
        self._closing: Ending | None = None
        self._tls: ssl.SSLContext | None = None

    async def open(self) -> None:
        """Connect to the store."""
        address = self._address
        self._tls = tls = None if address.tls is None else address.tls.context()
        program = os.urandom(16)  # another one each time, because numbers start again
        reconnector = await self._connected(program)
        assert reconnector.connection is not None
        self._reconnector = reconnector
        self.capabilities = reconnector.connection.welcome.abilities.model()
        if self._dial is None:
            self._heartbeat = NativeHeartbeat(address, tls, self.clock, program)

    async def _connected(self, program: bytes) -> NativeReconnector:
        dial = self._dial or dialler(self._address, self._tls)
        reconnector = NativeReconnector(self._address, self.clock, program, dial)
        await reconnector.open()
        return reconnector

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        reconnector, self._reconnector = self._reconnector, None
        if reconnector is not None:
            self._closing = Ending(partial(self._close, reconnector))
        if self._closing is not None:
            await self._closing.wait()

    async def _close(self, reconnector: NativeReconnector) -> None:
        try:
            await self._close_sessions(reconnector)
        finally:
            if self._heartbeat is not None:
                await self._heartbeat.aclose()
            await reconnector.aclose()

    async def _close_sessions(self, reconnector: NativeReconnector) -> None:
        """Close the sessions if the server can be reached; otherwise they expire."""
        if reconnector.connection is None or not reconnector.sessions:
            return
        closing = [
            reconnector.loop.create_task(each.close())
            for each in list(reconnector.sessions.values())
        ]
        try:
            await asyncio.wait(closing, timeout=_CLOSING)
        finally:
            for each in closing:
                each.cancel()
            await asyncio.gather(*closing, return_exceptions=True)

    def _opened(self) -> NativeReconnector:
        if self._reconnector is None:
            raise EngineUnavailable(f"{self.url} is not open")
        return self._reconnector

    def guard(self, node: str, name: str, token: int) -> GuardStatement:
        """Raise `Unsupported`: only the server knows its store."""
        raise Unsupported(
            f"the lease of {name!r} on {node} cannot be guarded over {self.url}: the client does "
            f"not know the server's store. If it is a postgresql:// store, execute the function "
            f"guard of its schema in the transaction, with the token {token}; otherwise use a "
            f"fence of tenure.fencing",
            node=node,
            name=name,
        )

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store currently grants nothing, if known."""
        reconnector = self._reconnector
        if reconnector is None:
            return None
        if reconnector.failure is None and any(
            each.is_store_lost for each in reconnector.sessions.values()
        ):
            return EngineUnavailable(STORE_LOST)
        return reconnector.failure

    # Sessions

    async def attach(self, how: Attach, events: SessionEvents) -> NativeSession:
        """Attach a session, or take one over."""
        reconnector = self._opened()
        plain_path(how.node)
        rules.check_window(how.recovery_window, how.node)
        rules.check_description(how.description, how.node)
        rules.check_key(how.key, how.node)
        session = NativeSession(reconnector, self._heartbeat, how, events)
        await _attach(reconnector, session)
        return session

    # Nodes

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        await self._call(wire.CreateNode, plain_path(path), Config.of(config), bool(exist_ok))

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        await self._call(wire.AlterNode, plain_path(path), Config.of(config))

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        await self._call(wire.DropNode, plain_path(path), bool(force))

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        found: NodeDescription = await self._call(wire.DescribeNode, plain_path(path))
        return found

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        found: list[str] = await self._call(wire.ListNodes)
        return found

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        found: list[SemaphoreDescription] = await self._call(
            wire.ListSemaphores, plain_path(path), bool(owners), bool(waiters)
        )
        return found

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore; with an older server, by listing all of the node."""
        path = plain_path(path)
        name = plain_name(name, path)
        try:
            found: SemaphoreDescription = await self._call(
                wire.Describe, path, name, bool(owners), bool(waiters), feature=wire.DESCRIBE
            )
        except _OlderServer:
            for each in await self.list_semaphores(path, owners=owners, waiters=waiters):
                if each.name == name:
                    return each
            raise refusals.semaphore_not_found(path, name) from None
        return found

    async def store_time(self) -> float:
        """Read the store's wall clock; with an older server, the local one."""
        try:
            return float(await self._call(wire.ReadStoreTime, feature=wire.STORE_TIME))
        except _OlderServer:
            return self.clock.wall()

    async def rate(self, path: str, name: str, call: RateCall) -> RateAnswer:
        """Carry out an operation on a rate."""
        path = plain_path(path)
        rule = call.rule
        fields = (call.kind, rule.limit, rule.per, rule.burst, call.count, call.longest_wait)
        try:
            answer: RateAnswer = await self._call(
                *(wire.Rate, path, plain_name(name, path), *fields, call.at),
                feature=wire.RATES,
                outage=EngineUnavailable,
                once=call.kind == "refund",  # twice, it would refund tokens of others
            )
        except _OlderServer:
            raise Unsupported(
                f"the server at {self.url} is of an earlier release, without rates: upgrade it",
                node=path,
                name=name,
            ) from None
        return answer

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        found: list[SessionDescription] = await self._call(wire.ListSessions, plain_path(path))
        return found

    def pages(self) -> NativePages | None:
        """Return the lists of the store in pages, unless the server is known to have none."""
        connection = self._opened().connection
        if connection is not None and wire.PAGES not in connection.welcome.features:
            return None
        return NativePages(self._read_page)

    async def _read_page(self, kind: Callable[..., Struct], *fields: object) -> Any:
        try:
            return await self._call(kind, *fields, feature=wire.PAGES)
        except _OlderServer:
            raise EngineError(
                f"the server at {self.url} has no pages of lists: upgrade it"
            ) from None

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; return false if it did not exist."""
        return bool(await self._call(wire.EndSession, plain_path(path), session_id))

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session as its program would: reattach it by its key, and close it."""
        program = bytes.fromhex(orphan.credential.partition(".")[0])
        reconnector = await self._connected(program)
        try:
            connection = await reconnector.connected()
            rids = reconnector.next_rid(), reconnector.next_rid()
            calls = [
                NativeCall(each.rid, each, reconnector.loop.create_future())
                for each in closing_again(orphan, reconnector.next_channel(), *rids)
            ]
            for each in calls:
                connection.submit(each)
            attaching, closing = (each.future for each in calls)
            await asyncio.wait([closing])  # the first has an answer only if it fails
            error = attaching.exception() if attaching.done() else None
            error = error or closing.exception()
            if not isinstance(error, SessionExpired | AuthenticationFailed | None):
                raise EngineError(
                    f"{self.url} did not end a session: {error}", node=orphan.node
                ) from error
        finally:
            await reconnector.aclose()

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; return false if it did not exist."""
        path = plain_path(path)
        return bool(await self._call(wire.Evict, path, plain_name(name, path), order_id))

    async def _call(
        self,
        kind: Callable[..., Struct],
        *fields: object,
        feature: str = "",
        outage: type[TenureError] = EngineError,
        once: bool = False,
    ) -> Any:
        """Send a request, across reconnects if needed.

        Args:
            kind: the class of the message.
            *fields: the fields of the message after its number.
            feature: the feature to which the message belongs.
            outage: class of the error without an answer.
            once: whether it is not sent again once the server may have carried it out.

        Raises:
            EngineError, or `outage`: no server answered within the timeout.
            _OlderServer: the server does not have the feature.
        """
        reconnector = self._opened()
        began = self.clock.now()
        while True:
            try:
                connection = await reconnector.connected()
            except EngineUnavailable as error:
                raise outage(str(error)) from None
            if feature and feature not in connection.welcome.features:
                raise _OlderServer
            rid = reconnector.next_rid()
            call = NativeCall(rid, kind(rid, *fields), reconnector.loop.create_future())
            connection.submit(call)
            try:
                return await call.future
            except ConnectionGone as gone:
                late = self.clock.now() - began > reconnector.timeout
                if late or (once and call.sent):
                    within = f" within {reconnector.timeout:g} s" if late else ""
                    raise outage(
                        f"{self.url} did not answer{within}: {gone}. It may have carried out the "
                        "request"
                    ) from None


# First attach of a session, and its first proof


async def _attach(reconnector: NativeReconnector, session: NativeSession) -> None:
    """Attach a session for the first time.

    Raises:
        the errors of `Engine.attach`. After an error or a cancellation, no new session is left.
    """
    rid = reconnector.next_rid()  # the same for all attempts
    call: NativeCall | None = None
    reconnector.add(session)
    refusals = 0
    try:
        while True:
            connection = await reconnector.connected()
            call = session.send_attach(rid, connection)
            await asyncio.wait([call.future])
            error = call.future.exception()
            if error is None:
                break
            if isinstance(error, ConnectionGone):
                continue
            refusals += 1
            if not _try_others(reconnector, error, refusals):
                raise error
            reconnector.try_others(connection, str(error))
        await _until_proven(session)
    except BaseException:
        session.abandon(call)
        raise


def _try_others(reconnector: NativeReconnector, error: BaseException, refusals: int) -> bool:
    """Return true to try another server: the error is of this server, and no session needs it."""
    return (
        isinstance(error, EngineError | EngineUnavailable)
        and refusals < len(reconnector.address.endpoints)
        and len(reconnector.sessions) == 1
    )


async def _until_proven(session: NativeSession) -> None:
    """Wait for a recent proof, because the answer may have taken long."""
    window = session.window
    try:
        async with asyncio.timeout(window):
            while not session.is_fresh():
                if session.why_over is not None:
                    raise _lost(session)
                session.changed.clear()
                session.renew()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(window / 6):
                        await session.changed.wait()
    except TimeoutError:
        raise EngineUnavailable(
            f"the session on {session.path} was attached, but not renewed within {window:g} s. "
            "Check that the server reaches its store",
            node=session.path,
        ) from None


def _lost(session: NativeSession) -> TenureError:
    """Return the error for a session that ended before its first proof."""
    assert session.why_over is not None
    if session.is_resumed:
        return session.why_over
    return EngineUnavailable(
        f"the session on {session.path} ended before its first renewal: {session.why_over}",
        node=session.path,
    )
