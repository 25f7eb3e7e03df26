"""Credentials: the token of a call, and the files for TLS.

A password is exchanged for a token by the database's login. Cloud credentials, and the SDK's
environment variables, are handled by YDB's SDK, which is imported only for them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc

from tenure.engines.ydb.errors import check, code_of
from tenure.engines.ydb.url import YdbUrl
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    InvalidArgument,
    Unsupported,
)
from tenure.wire.ydb import Message, message_class, unpacked

AGE = 30 * 60.0
"""Seconds for which the token of a login is used; YDB's own tokens live longer."""

_KEY_FILE = "YDB_SERVICE_ACCOUNT_KEY_FILE_CREDENTIALS"
_IN_ENVIRONMENT = (
    _KEY_FILE,
    "YDB_USER",
    "YDB_ANONYMOUS_CREDENTIALS",
    "YDB_METADATA_CREDENTIALS",
    "YDB_ACCESS_TOKEN_CREDENTIALS",
    "YDB_OAUTH2_KEY_FILE",
)

Login: TypeAlias = Callable[[Message], Awaitable[Message]]
"""Sends a login to a server, without a token, and returns the operation in its answer."""

Token: TypeAlias = Callable[[Login], Awaitable[str]]
"""Returns the token to send, or empty. Raises `EngineUnavailable`, `AuthenticationFailed`."""


def token_of(address: YdbUrl) -> Token:
    """Return the source of the tokens that a URL, or the environment, specifies.

    Raises:
        Unsupported: the SDK lacks a package that these credentials need.
    """
    kind, user, password = address.credentials, address.user, address.password
    if kind == "environment":
        if not any(name in os.environ for name in _IN_ENVIRONMENT):
            kind = "anonymous"  # the SDK would query a cloud's metadata service
        elif "YDB_USER" in os.environ and _KEY_FILE not in os.environ:
            kind, user = "static", os.environ["YDB_USER"]
            password = os.environ.get("YDB_PASSWORD", "")
    match kind:
        case "anonymous" | "token":
            return _constant(address.token)
        case "static":
            return _Password(user, password).token
        case _:
            return _from_sdk(address, in_cloud=kind == "metadata")


def _constant(token: str) -> Token:
    async def known(_: Login) -> str:
        return token

    return known


def _from_sdk(address: YdbUrl, *, in_cloud: bool) -> Token:
    try:
        import ydb.iam

        sdk: Any = ydb  # has no types here
        found = (
            sdk.iam.MetadataUrlCredentials() if in_cloud else sdk.credentials_from_env_variables()
        )
    except ImportError as error:
        raise Unsupported(
            f"{address.url}: YDB's SDK lacks a package for these credentials: {error}"
        ) from error

    async def fetched(_: Login) -> str:
        try:
            metadata = await asyncio.to_thread(found.auth_metadata)  # may fetch a token
        except sdk.issues.Error as error:
            raise EngineUnavailable(f"no token from the SDK's credentials: {error}") from error
        return "".join(token for _, token in metadata)

    return fetched


class _Password:
    """Token of a login with a password, renewed when it is old."""

    def __init__(self, user: str, password: str) -> None:
        self._request = message_class("Auth.LoginRequest")(user=user, password=password)
        self._lock = asyncio.Lock()
        self._token = ""
        self._obtained_at = 0.0

    async def token(self, login: Login) -> str:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if not self._token or loop.time() - self._obtained_at > AGE:
                self._token = await self._log_in(login)
                self._obtained_at = loop.time()
            return self._token

    async def _log_in(self, login: Login) -> str:
        try:
            operation = await login(self._request)
        except EngineUnavailable as error:
            if code_of(error.__cause__) is grpc.StatusCode.UNIMPLEMENTED:
                raise AuthenticationFailed(
                    "the server has no login with a password; use a token (?token=)"
                ) from error
            raise
        check(operation)
        return str(unpacked(operation, "Auth.LoginResult").token)


def tls_of(address: YdbUrl) -> grpc.ChannelCredentials | None:
    """Return the credentials of TLS, with the contents of its files."""
    tls = address.tls
    if tls is None:
        return None
    authorities = tls.ca or os.environ.get("YDB_SSL_ROOT_CERTIFICATES_FILE", "")
    if authorities:
        roots = _read(address, authorities)
    else:
        import ydb.default_pem

        roots = cast("Any", ydb).default_pem.load_default_pem()
    key, certificate = (_read(address, path) if path else None for path in (tls.key, tls.cert))
    return grpc.ssl_channel_credentials(roots, key, certificate)


def _read(address: YdbUrl, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgument(
            f"{address.url}: TLS file {path!r} cannot be read: {error}"
        ) from error
