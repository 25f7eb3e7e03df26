"""The way to the servers: the SDK's driver, which discovers, connects, and shows credentials.

Rules:

* What fails on the way is an `OutOfReach`; what was lost is the caller's to try again.
* Where endpoints are discovered, the driver leaves a broken connection by itself and discovers
  anew. Where they are not, it never connects again, so that it is replaced by a new one.
* Everything that was begun here has ended when `aclose` returns: gRPC finishes the calls that
  were cut off in tasks of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, cast

import grpc
import grpc.aio
import ydb
from ydb import _apis, issues
from ydb.aio.connection import Connection
from ydb.aio.driver import Driver
from ydb.credentials import Credentials

from tenure.engines._kit.url import Tls
from tenure.engines.ydb.messages import Message
from tenure.engines.ydb.url import YdbUrl
from tenure.errors import AuthenticationFailed, InvalidArgument, TenureError, Unsupported

__all__ = ["Channel", "OutOfReach", "Stream"]

FINISHING = 1.0
"""Seconds that gRPC is given to finish what was cut off."""

ASKING_WHY = 2.0
"""Seconds in which it is found out why connecting failed."""

_KEY_FILE = "YDB_SERVICE_ACCOUNT_KEY_FILE_CREDENTIALS"
_IN_ENVIRONMENT = (
    _KEY_FILE,
    "YDB_USER",
    "YDB_ANONYMOUS_CREDENTIALS",
    "YDB_METADATA_CREDENTIALS",
    "YDB_ACCESS_TOKEN_CREDENTIALS",
    "YDB_OAUTH2_KEY_FILE",
)
_OPTIONS = [
    # A server that is started anew is found soon; connecting may still take long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    ("grpc.min_reconnect_backoff_ms", 5000),
]
_LONG = 365 * 24 * 3600.0
"""Seconds: the deadline of a stream, which the SDK would otherwise make ten minutes."""


class OutOfReach(Exception):
    """It did not work; it may later."""


class Stream:
    """One stream of the coordination service.

    It ends alone. Only when its connection is broken, the SDK is made to leave the connection, and
    with it all streams that it carries.
    """

    def __init__(self, channel: Channel, driver: Driver, opened: Any) -> None:
        self._channel = channel
        self._driver = driver
        self._leave_connection = opened.on_disconnected_callback
        self._connection: object = opened.rpc_state.rpc  # each connection has one of its own
        # The driver hands out connections of which the server has been heard.
        channel.heard_at.setdefault(self._connection, asyncio.get_running_loop().time())
        self._call = opened.resp
        self._messages = opened.it

    async def write(self, message: Message) -> None:
        """Raises `OutOfReach`."""
        with _as_out_of_reach():
            await self._call.write(message)

    async def read(self) -> Message | None:
        """The next message; ``None`` when the server has ended the stream in good order.

        Raises:
            OutOfReach: it is broken.
            AuthenticationFailed: the server wants other credentials.
        """
        try:
            with _as_out_of_reach():
                message = await anext(self._messages, None)
        except OutOfReach as error:
            if _broken(error.__cause__):
                await self.condemn()
            raise
        self._channel.heard_at[self._connection] = asyncio.get_running_loop().time()
        return message

    def connection_heard_since(self, instant: float) -> bool:
        """Return true if anything has come over the connection since then, on the loop's clock."""
        return self._channel.heard_at[self._connection] >= instant

    async def half_close(self) -> None:
        """Nothing more will be written. Raises `OutOfReach`."""
        with _as_out_of_reach():
            await self._call.done_writing()

    def cut(self) -> None:
        """End the stream at once; its reader is notified."""
        self._channel.cut_off = True
        self._call.cancel()

    async def condemn(self) -> None:
        """The connection is not worth anything any more: leave it, with all its streams."""
        self.cut()
        with contextlib.suppress(OutOfReach), _as_out_of_reach():
            await self._leave_connection()
        self._channel.left(self._driver)


class Channel:
    """Connections to one database, for one engine.

    Attributes:
        cut_off: whether a call has ended in another way than in good order.
        heard_at: when something came over a connection, on the loop's clock.
    """

    def __init__(self, address: YdbUrl) -> None:
        self._address = address
        self._driver: Driver | None = None
        self._left: set[asyncio.Task[None]] = set()
        self.cut_off = False
        self.heard_at: MutableMapping[object, float] = weakref.WeakKeyDictionary()

    async def open(self) -> None:
        """Connect.

        Raises:
            OutOfReach: there is no answer.
            AuthenticationFailed: the server wants other credentials.
            InvalidArgument: a file that the URL names cannot be read.
        """
        self._driver = driver = self._new_driver()
        try:
            with _as_out_of_reach():
                async with asyncio.timeout(self._address.connect_timeout):
                    await driver.wait(
                        timeout=self._address.connect_timeout, fail_fast=self._address.discovery
                    )
        except (OutOfReach, TimeoutError) as error:
            self.cut_off = True
            details = driver.discovery_debug_details()
            try:
                await self._check_credentials()
            finally:
                await self.aclose()
            why = _brief(details) or str(error)
            within = f"no answer within {self._address.connect_timeout:g} s"
            raise OutOfReach(why or within) from error
        except BaseException:
            self.cut_off = True
            await self.aclose()
            raise

    async def _check_credentials(self) -> None:
        """Raise `AuthenticationFailed` if that is why the driver found no endpoints.

        The driver itself keeps no more of the reason than words.
        """
        config = self._config()
        connection = Connection(config.endpoint, config)
        request = _apis.ydb_discovery.ListEndpointsRequest(database=self._address.database)
        settings = ydb.BaseRequestSettings().with_timeout(ASKING_WHY)
        with contextlib.suppress(OutOfReach, TimeoutError):
            try:
                with _as_out_of_reach():
                    async with asyncio.timeout(ASKING_WHY):
                        response = await connection(
                            request,
                            _apis.DiscoveryService.Stub,
                            _apis.DiscoveryService.ListEndpoints,
                            settings=settings,
                        )
                        issues._process_response(response.operation)
            finally:
                await connection.destroy()

    async def call(self, request: Message, method: str) -> Message:
        """The operation that a call of the coordination service answers with.

        Raises:
            OutOfReach, AuthenticationFailed
        """
        driver = self._opened()
        settings = ydb.BaseRequestSettings().with_timeout(self._address.connect_timeout)
        try:
            with _as_out_of_reach():
                response = await driver(
                    request, _apis.CoordinationService.Stub, method, settings=settings
                )
        except BaseException as error:
            self.cut_off = True
            if isinstance(error, OutOfReach):
                self.left(driver)
            raise
        return response.operation

    async def stream(self) -> Stream:
        """A new stream; it may be connected or not, which its first answer tells.

        Raises:
            OutOfReach, AuthenticationFailed
        """
        driver = self._opened()
        settings = ydb.BaseRequestSettings().with_timeout(_LONG)
        with _as_out_of_reach():
            call = await driver(
                None,
                _apis.CoordinationService.Stub,
                _apis.CoordinationService.Session,
                settings=settings,
            )
        return Stream(self, driver, call)

    def left(self, driver: Driver) -> None:
        """The driver's connection is broken."""
        if not self._address.discovery and self._driver is driver:
            self._driver = self._new_driver()
            task = asyncio.create_task(_stop(driver), name="tenure-ydb-leave")
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    async def aclose(self) -> None:
        """Leave, and wait until everything has ended. Safe to call twice."""
        driver, self._driver = self._driver, None
        if driver is not None:
            await _stop(driver)
        if self._left:
            await asyncio.wait(list(self._left))
        if self.cut_off:
            await _finished()

    def _opened(self) -> Driver:
        if self._driver is None:
            raise OutOfReach("it is not open")
        return self._driver

    def _new_driver(self) -> Driver:
        return Driver(self._config())

    def _config(self) -> ydb.DriverConfig:
        address = self._address
        scheme = "grpc" if address.tls is None else "grpcs"
        files = {} if address.tls is None else _files(address, address.tls)
        credentials = _credentials(address)
        config = ydb.DriverConfig(
            f"{scheme}://{address.endpoints[0]}",
            address.database,
            endpoints=list(address.endpoints[1:]),
            credentials=credentials,
            disable_discovery=not address.discovery,
            channel_options=_OPTIONS,
            **files,
        )
        credentials._update_driver_config(config)  # those that log in have to know where
        return config


_REFUSED = (issues.Unauthenticated, issues.Unauthorized)


class _InThread(Credentials):
    """Credentials that may have to be fetched, without holding up the event loop meanwhile."""

    def __init__(self, inner: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inner = inner

    async def auth_metadata(self) -> Iterable[tuple[str, str]]:
        try:
            found = await asyncio.to_thread(self._inner.auth_metadata)
        except issues.ConnectionError as error:
            wrong = error.__context__  # of which the SDK keeps no more than words
            if isinstance(wrong, _REFUSED):
                raise wrong from error
            if isinstance(wrong, issues.Unimplemented):
                raise issues.Unauthenticated(
                    "it has no login with a password; show it a token"
                ) from error
            raise
        return cast("Iterable[tuple[str, str]]", found)

    def _update_driver_config(self, driver_config: Any) -> None:
        self._inner._update_driver_config(driver_config)


def _credentials(address: YdbUrl) -> Any:
    sdk: Any = ydb  # has no types here
    kind = address.credentials
    if kind == "environment" and not any(name in os.environ for name in _IN_ENVIRONMENT):
        kind = "anonymous"  # the SDK would ask a cloud's metadata service
    if kind == "anonymous":
        return sdk.AnonymousCredentials()
    if kind == "token":
        return sdk.AccessTokenCredentials(address.token)
    user, password = address.user, address.password
    if kind == "environment" and "YDB_USER" in os.environ and _KEY_FILE not in os.environ:
        # The SDK's own way there ends in an UnboundLocalError (3.33.2).
        kind, user = "static", os.environ["YDB_USER"]
        password = os.environ.get("YDB_PASSWORD", "")
    if kind == "static":
        return _InThread(sdk.StaticCredentials.from_user_password(user, password))
    try:
        if kind == "metadata":
            iam: Any = importlib.import_module("ydb.iam")
            return _InThread(iam.MetadataUrlCredentials())
        return _InThread(sdk.credentials_from_env_variables())
    except ImportError as error:
        raise Unsupported(
            f"{address.url}: YDB's SDK has not all that these credentials need: {error}"
        ) from error


def _files(address: YdbUrl, tls: Tls) -> dict[str, Any]:
    """Return the contents of the files for TLS, by the names that the SDK has for them."""
    paths = {
        "root_certificates": tls.ca,
        "certificate_chain": tls.cert,
        "private_key": tls.key,
    }
    files: dict[str, Any] = {name: _read(address, path) for name, path in paths.items() if path}
    if not tls.ca:
        certificates = ydb.load_ydb_root_certificate()  # YDB_SSL_ROOT_CERTIFICATES_FILE
        if certificates is not None:
            files["root_certificates"] = certificates
    return files


def _read(address: YdbUrl, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgument(f"{address.url}: {path!r} cannot be read: {error}") from error


@contextlib.contextmanager
def _as_out_of_reach() -> Any:
    """Whatever the SDK and gRPC raise for a connection that does not work."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as error:  # a call on a connection that is just being closed fails anyhow
        if isinstance(error, _REFUSED) or (
            _code_of(error) in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
        ):
            raise AuthenticationFailed(
                f"the server refused the credentials: {_brief(str(error))}"
            ) from error
        raise OutOfReach(_brief(str(error)) or type(error).__name__) from error
    except asyncio.CancelledError as error:
        # gRPC says so too when it was a call that was cancelled, with its connection.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise OutOfReach("the connection was closed") from error


def _code_of(error: BaseException | None) -> grpc.StatusCode | None:
    """The status of a call."""
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def _broken(error: BaseException | None) -> bool:
    """Return true if the connection failed, and not the one call."""
    return _code_of(error) is grpc.StatusCode.UNAVAILABLE


def _brief(text: str) -> str:
    """The first words of what may be pages."""
    words = " ".join(text.split())
    return words if len(words) <= 300 else words[:297] + "..."


async def _stop(driver: Driver) -> None:
    with contextlib.suppress(issues.Error, grpc.RpcError, TenureError):
        await driver.stop(timeout=1)


async def _finished() -> None:
    """Wait until gRPC has finished what was cut off.

    Nothing leads from a call to the task that finishes it, so that all of this loop's are waited
    for; one of another user's stream may go on, so not for long.
    """
    ending = [
        task
        for task in asyncio.all_tasks()
        if getattr(task.get_coro(), "__qualname__", "").endswith("_handle_status_once_received")
    ]
    if ending:
        await asyncio.wait(ending, timeout=FINISHING)
