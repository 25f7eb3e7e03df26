"""The members of a cluster, and what is asked of them: one channel each, for everything.

Rules:

* A call goes to the current member. Where it is not answered, or not by a member that has a
  leader, the next one becomes the current one, for all callers, and the caller gets `Lost`: its
  operation may have been done, or may still be. The caller decides what to do about that.
* Whatever etcd refuses for a reason that stays is `Refused`; `failure` makes it one of our errors.
* A token of an account is fetched when it is first needed, and again when it is not valid any
  more. What was refused for its sake was not done, and is asked again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator

from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.calls import CallFailed, Code, StreamCall
from tenure.engines.etcd.channel import Channel, Metadata
from tenure.engines.etcd.url import EtcdUrl
from tenure.errors import AuthenticationFailed, EngineError, InvalidArgument, TenureError

__all__ = ["Lost", "Members", "Refused", "failure", "pauses", "trouble_of"]

_MAY_PASS = frozenset(
    {
        Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED,
        Code.CANCELLED,
        Code.UNKNOWN,
        Code.INTERNAL,
        Code.ABORTED,
    }
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5

_NONE = "none"
"""In the place of a token, where there are no accounts: old members refuse any token then."""


class Lost(Exception):
    """It was not answered. It may have been done all the same, or be done later."""


class Refused(Exception):
    """It was refused, and not done.

    Attributes:
        code: how the call ended.
        reason: etcd's words.
    """

    def __init__(self, code: Code, reason: str) -> None:
        """Keep the code and the reason."""
        super().__init__(reason)
        self.code = code
        self.reason = reason

    @property
    def no_lease(self) -> bool:
        """True if there is no such lease: it has run out, or was revoked."""
        return "lease not found" in self.reason

    @property
    def compacted(self) -> bool:
        """True if the history of that time is gone."""
        return self.code is Code.OUT_OF_RANGE


class _Stale(Exception):
    """The token is not valid any more."""


def failure(
    url: str, refused: Refused, *, node: str | None = None, name: str | None = None
) -> TenureError:
    """Make one of our errors of a refusal."""
    reason, where = refused.reason, {"node": node, "name": name}
    if refused.code in {Code.PERMISSION_DENIED, Code.UNAUTHENTICATED} or "user name" in reason:
        return AuthenticationFailed(
            f"{url} refused the account ({reason}); it needs a user who may read and write "
            "everything under the prefix",
            **where,
        )
    if "space exceeded" in reason:
        return EngineError(
            f"{url} has no space left ({reason}): nothing is granted until it is compacted and "
            "defragmented and the alarm is disarmed (etcdctl compact, defrag, alarm disarm)",
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
    return EngineError(f"{url} refused the request: {reason}", **where)


def trouble_of(failed: CallFailed) -> Exception:
    """Classify a failed call: `Lost`, `Refused`, or that another token is needed."""
    code, reason = failed.code, " ".join(str(failed).split())
    if "invalid auth token" in reason or "auth store is old" in reason:
        return _Stale(reason)
    if code in _MAY_PASS or "too many requests" in reason:
        return Lost(reason)
    return Refused(code, reason)


def pauses() -> Iterator[float]:
    """Seconds to wait after each attempt that was not answered."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def secrets_of(address: EtcdUrl) -> ssl.SSLContext | None:
    """Make the TLS context of the connections.

    Raises:
        InvalidArgument: one of the files that the URL names cannot be read.
    """
    if address.tls is None:
        return None
    context = address.tls.context()
    context.set_alpn_protocols(["h2"])
    return context


class Members:
    """The members that the URL names.

    Attributes:
        turn: rises whenever another member becomes the current one.
        moved: called then.
        trouble: why a call was lost the last time.
    """

    def __init__(self, address: EtcdUrl) -> None:
        """Start without channels."""
        self._address = address
        self._channels: list[Channel] = []
        self._token = ""
        self._with_account = bool(address.user)
        self._authenticating: asyncio.Lock | None = None
        self.turn = 0
        self.moved: Callable[[], None] = lambda: None
        self.trouble = ""

    def open(self) -> None:
        """Make the channels; they connect when they are used. Raises `InvalidArgument`."""
        address = self._address
        secrets = secrets_of(address)
        name = address.tls.server_name if address.tls is not None else ""
        self._authenticating = asyncio.Lock()
        self._channels = [Channel(endpoint, secrets, name) for endpoint in address.endpoints]

    async def aclose(self) -> None:
        """Leave; calls that are under way are lost. Safe to call twice."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.aclose()

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._channels)

    def _channel(self, turn: int) -> Channel:
        """To the member whose turn it is."""
        if not self._channels:
            raise Lost("it is closed")
        return self._channels[turn % len(self._channels)]

    def leave(self, turn: int, why: str) -> None:
        """The member whose turn it was does not answer: have the next one asked."""
        self.trouble = why
        if turn == self.turn:
            self.turn += 1
            self.moved()

    # Calls

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Call the current member.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        turn = self.turn
        try:
            if self._with_account:
                return await self.call_member(turn, method, request, timeout)
            return await self._call(turn, method, request, timeout, ())
        except Lost as lost:
            self.leave(turn, str(lost))
            raise

    async def call_member(self, turn: int, method: str, request: bytes, timeout: float) -> bytes:
        """Call the member of that turn.

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
            except Refused as refused:
                if token != _NONE or "user name" not in refused.reason:
                    raise
                why = str(refused)  # there are accounts since a moment ago
            self.expire(token)
        raise Lost(why)

    async def _call(
        self, turn: int, method: str, request: bytes, timeout: float, metadata: Metadata
    ) -> bytes:
        try:
            return await self._channel(turn).call(method, request, timeout, metadata)
        except CallFailed as failed:
            raise trouble_of(failed) from failed

    async def converse(self, turn: int, method: str, *more: tuple[str, str]) -> StreamCall:
        """Begin a call of messages both ways with that member; reading tells what fails.

        Raises:
            Lost, AuthenticationFailed: there is no token.
        """
        metadata = await self.metadata(turn)
        return self._channel(turn).converse(method, (*metadata, *more))

    # Accounts

    async def metadata(self, turn: int) -> Metadata:
        """Return the metadata of every call."""
        if not self._address.user:
            return ()
        if not self._token:
            assert self._authenticating is not None
            async with self._authenticating:
                if not self._token:
                    self._token = await self._authenticate(turn)
        return () if self._token == _NONE else (("token", self._token),)

    def expire(self, token: str = "") -> None:
        """This token, or any, is not valid any more."""
        if token in {self._token, ""}:
            self._token = ""

    async def _authenticate(self, turn: int) -> str:
        address = self._address
        request = wire.authenticate(address.user, address.password)
        try:
            answer = await self._call(turn, wire.AUTHENTICATE, request, address.timeout, ())
        except Refused as refused:
            if "not enabled" in refused.reason:
                return _NONE
            raise AuthenticationFailed(
                f"{address.url} refused the user {address.user!r}: {refused.reason}"
            ) from refused
        except _Stale as stale:
            raise Lost(str(stale)) from stale
        return answers.read_string(answer, 2)
