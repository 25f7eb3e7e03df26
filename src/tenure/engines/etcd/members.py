"""The members of a cluster, and what is asked of them: one channel each, for everything.

Rules:

* A call goes to the current member. Where it is not answered, or not by a member that has a
  leader, the next one becomes the current one, for everybody, and the caller gets `Lost`: what it
  asked for may have been done, or may still be. What to do about that is the caller's business.
* Whatever etcd refuses for a reason that stays is `Refused`; `failure` makes it one of our errors.
* A token of an account is fetched when it is first needed, and again when it is not valid any
  more. What was refused for its sake was not done, and is asked again.
* A stream that is cut off is finished by gRPC in a task of its own, which is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tenure.engines.etcd import wire
from tenure.engines.etcd.url import Address
from tenure.errors import AuthenticationFailed, EngineError, InvalidArgument, TenureError

__all__ = [
    "Lost",
    "Member",
    "Members",
    "Refused",
    "cut",
    "failure",
    "read_files",
    "trouble_of",
]

FINISHING = 1.0
"""Seconds that gRPC is given to finish what was cut off."""

_OPTIONS: list[tuple[str, Any]] = [
    # A member that is started anew is found soon, and one that is not there is given up soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A member that is stopped, or cut off, answers no pings; etcd allows one in five seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # As much as etcd can say.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

_Code = grpc.StatusCode
_MAY_PASS = frozenset(
    {
        _Code.UNAVAILABLE,
        _Code.DEADLINE_EXCEEDED,
        _Code.CANCELLED,
        _Code.UNKNOWN,
        _Code.INTERNAL,
        _Code.ABORTED,
    }
)


class Lost(Exception):
    """It was not answered. It may have been done all the same, or be done later."""


class Refused(Exception):
    """It was refused, and not done.

    Attributes:
        code: gRPC's.
        reason: etcd's words.
    """

    def __init__(self, code: Any, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason

    @property
    def no_lease(self) -> bool:
        """There is no such lease: it has run out, or was revoked."""
        return "lease not found" in self.reason

    @property
    def compacted(self) -> bool:
        """What was asked for is too long ago."""
        return self.code is _Code.OUT_OF_RANGE


class _Stale(Exception):
    """The token is not valid any more."""


def failure(
    url: str, refused: Refused, *, node: str | None = None, name: str | None = None
) -> TenureError:
    """Why etcd refused something, as one of our errors."""
    reason, where = refused.reason, {"node": node, "name": name}
    if refused.code in {_Code.PERMISSION_DENIED, _Code.UNAUTHENTICATED} or "user name" in reason:
        return AuthenticationFailed(
            f"{url} refused the account ({reason}); it needs a user who may read and write "
            "everything under the prefix",
            **where,
        )
    if "space exceeded" in reason:
        return EngineError(
            f"{url} has no space left ({reason}): nothing is granted until somebody compacts and "
            "defragments it and disarms the alarm (etcdctl compact, defrag, alarm disarm)",
            **where,
        )
    if "too large" in reason or "larger than max" in reason:
        return InvalidArgument(
            f"{url} takes no request of this size ({reason}): less data, or members with a larger "
            "--max-request-bytes",
            **where,
        )
    if "too many operations" in reason:
        return EngineError(
            f"{url} takes fewer operations in one transaction than its default, 128 ({reason}): "
            "give its members a larger --max-txn-ops",
            **where,
        )
    return EngineError(f"{url} refused what was asked of it: {reason}", **where)


def trouble_of(error: grpc.RpcError) -> Exception:
    """What a failed call means: `Lost`, `Refused`, or that another token is needed."""
    code, reason = error.code(), " ".join(str(error.details() or "").split())
    if "invalid auth token" in reason or "auth store is old" in reason:
        return _Stale(reason)
    if code in _MAY_PASS or "too many requests" in reason:
        return Lost(reason or str(code))
    return Refused(code, reason)


def read_files(address: Address) -> dict[str, bytes | None]:
    """The certificates and keys that the URL names.

    Raises:
        InvalidArgument: one of them cannot be read.
    """
    files: dict[str, bytes | None] = {}
    for name, path in address.files:
        try:
            with open(path, "rb") as file:
                files[name] = file.read()
        except OSError as error:
            raise InvalidArgument(f"{address.url}: {path!r} cannot be read: {error}") from error
    return files


def options_of(address: Address) -> list[tuple[str, Any]]:
    """How a channel is made."""
    if not address.server_name:
        return list(_OPTIONS)
    return [*_OPTIONS, ("grpc.ssl_target_name_override", address.server_name)]


def credentials_of(files: dict[str, bytes | None]) -> Any:
    """How a channel is encrypted."""
    return grpc.ssl_channel_credentials(
        files.get("root_certificates"), files.get("private_key"), files.get("certificate_chain")
    )


class Member:
    """The channel to one member.

    Attributes:
        calls: of one request and one answer, by the method's name.
        watch, keep_alive: calls that are streams.
    """

    def __init__(self, address: Address, endpoint: str, files: dict[str, bytes | None]) -> None:
        options = options_of(address)
        self.endpoint = endpoint
        self._channel = (
            grpc.aio.secure_channel(endpoint, credentials_of(files), options)
            if address.secure
            else grpc.aio.insecure_channel(endpoint, options)
        )
        self.calls: dict[str, Any] = {}
        for method in (
            *(wire.RANGE, wire.TXN, wire.LEASE_GRANT, wire.LEASE_REVOKE),
            *(wire.TIME_TO_LIVE, wire.AUTHENTICATE, wire.STATUS),
        ):
            self.calls[method] = self._channel.unary_unary(method)
        self.watch: Callable[..., Any] = self._channel.stream_stream(wire.WATCH)
        self.keep_alive: Callable[..., Any] = self._channel.stream_stream(wire.KEEP_ALIVE)

    async def aclose(self) -> None:
        await self._channel.close()


class Members:
    """The members that the URL names.

    Attributes:
        turn: rises whenever another member becomes the current one.
        moved: called then.
        trouble: why a call was lost the last time.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._members: list[Member] = []
        self._token = ""
        self._with_account = bool(address.user)
        self._authenticating: asyncio.Lock | None = None
        self.turn = 0
        self.moved: Callable[[], None] = lambda: None
        self.trouble = ""

    def open(self) -> None:
        """Make the channels; they connect when they are used. Raises `InvalidArgument`."""
        files = read_files(self._address)
        self._authenticating = asyncio.Lock()
        self._members = [Member(self._address, each, files) for each in self._address.endpoints]

    async def aclose(self) -> None:
        """Leave; calls that are under way are lost. Safe to call twice."""
        members, self._members = self._members, []
        for member in members:
            await member.aclose()

    def __len__(self) -> int:
        return len(self._members)

    def member(self, turn: int) -> Member:
        """Whose turn it is."""
        if not self._members:
            raise Lost("it is closed")
        return self._members[turn % len(self._members)]

    def leave(self, turn: int, why: str) -> None:
        """The member whose turn it was does not answer: have the next one asked."""
        self.trouble = why
        if turn == self.turn:
            self.turn += 1
            self.moved()

    # Calls

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """What the current member answers.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        turn = self.turn
        try:
            if self._with_account:
                return await self.call_member(turn, method, request, timeout)
            return await self._call(turn, method, request, timeout, None)
        except Lost as lost:
            self.leave(turn, str(lost))
            raise

    async def call_member(self, turn: int, method: str, request: bytes, timeout: float) -> bytes:
        """What that member answers.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        for _ in range(3):
            metadata = await self.metadata(turn)
            token = self._token
            try:
                return await self._call(turn, method, request, timeout, metadata)
            except _Stale as stale:
                why = str(stale)
                self.expire(token)
        raise Lost(why)

    async def _call(
        self, turn: int, method: str, request: bytes, timeout: float, metadata: Any
    ) -> bytes:
        try:
            call = self.member(turn).calls[method]
            answer: bytes = await call(request, timeout=timeout, metadata=metadata)
            return answer
        except grpc.aio.AioRpcError as error:
            raise trouble_of(error) from error
        except asyncio.CancelledError:
            # gRPC says so too when it was the channel that was closed.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Lost("the channel was closed") from None
        except grpc.aio.UsageError as error:  # the channel is closed
            raise Lost(str(error)) from error

    # Accounts

    async def metadata(self, turn: int) -> Any:
        """What is sent along with every call."""
        if not self._address.user:
            return None
        if not self._token:
            assert self._authenticating is not None
            async with self._authenticating:
                if not self._token:
                    self._token = await self._authenticate(turn)
        return (("token", self._token),)

    def expire(self, token: str = "") -> None:
        """This token, or any, is not valid any more."""
        if token in {self._token, ""}:
            self._token = ""

    async def _authenticate(self, turn: int) -> str:
        address = self._address
        request = wire.authenticate(address.user, address.password)
        try:
            answer = await self._call(turn, wire.AUTHENTICATE, request, address.timeout, None)
        except Refused as refused:
            if "not enabled" in refused.reason:
                return "none"  # there are no accounts there, and whatever is sent is ignored
            raise AuthenticationFailed(
                f"{address.url} refused the user {address.user!r}: {refused.reason}"
            ) from refused
        except _Stale as stale:
            raise Lost(str(stale)) from stale
        return wire.read_string(answer, 2)


def finishing() -> set[asyncio.Task[Any]]:
    """The tasks in which gRPC waits for the ends of this loop's streams."""
    return {
        task
        for task in asyncio.all_tasks()
        if getattr(task.get_coro(), "__qualname__", "").endswith("_handle_status_once_received")
    }


async def cut(call: Any, among: set[asyncio.Task[Any]] | None = None) -> None:
    """End a stream, and wait until gRPC has finished it.

    Nothing leads from a call to the task that finishes it. It is one of `among`, and the one that
    ends now; the others may go on, so they are not waited for.
    """
    if among is None and call.done() and not call.cancelled():
        return
    tasks = finishing() if among is None else among
    call.cancel()  # reading may have done so already, when it was cancelled
    if tasks:
        await asyncio.wait(tasks, timeout=FINISHING, return_when=asyncio.FIRST_COMPLETED)
