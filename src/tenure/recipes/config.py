"""A shared configuration: one value that programs publish and follow.

It is the data of a lasting semaphore of limit 1, created when missing. Empty data means that
nothing has been published yet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from tenure.errors import InvalidArgument, SemaphoreExists, SemaphoreNotFound
from tenure.model import SemaphoreDescription
from tenure.recipes.base import Source, States

T = TypeVar("T")


class Codec(Protocol[T]):
    """Conversion between values and bytes. Its exceptions become `InvalidArgument`."""

    def encode(self, value: T, /) -> bytes:
        """Convert a value to the bytes that the store keeps."""
        ...

    def decode(self, data: bytes, /) -> T:
        """Convert bytes from the store to a value."""
        ...


class _Json(Generic[T]):
    """JSON in UTF-8. Equal values have equal bytes, so setting one again notifies no watch."""

    def __init__(self, dump: Callable[[T], Any], load: Callable[[Any], T]) -> None:
        self._dump = dump
        self._load = load

    def encode(self, value: T, /) -> bytes:
        return json.dumps(
            self._dump(value),
            allow_nan=False,
            ensure_ascii=False,
            separators=(",", ":"),
            sort_keys=True,
        ).encode()

    def decode(self, data: bytes, /) -> T:
        return self._load(json.loads(data))


def _as_it_is(value: Any) -> Any:
    return value


def _fields(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


json_codec: Codec[Any] = _Json[Any](_as_it_is, _as_it_is)
"""Values as JSON: ``None``, numbers, text, lists, and dicts with text for keys."""


def dataclass_codec(cls: Callable[..., T]) -> Codec[T]:
    """Values of one dataclass as JSON objects.

    Args:
        cls: a dataclass whose fields JSON can represent; a nested dataclass is decoded to a dict.
    """
    return _Json(_fields, lambda fields: cls(**fields))


class SharedConfig(Generic[T]):
    """A value on a node that programs publish and follow.

    Example::

        from tenure.recipes import SharedConfig

        limits = SharedConfig(session, "limits")
        await limits.set({"workers": 4})
        assert await limits.get() == {"workers": 4}

    The last `set` wins; when it returns, the value is on its way to every subscriber. For a
    read-modify-write, hold a mutex from the `get` to the `set`.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,024 bytes.
        codec: the encoding of the value, to 1 byte to 1 MiB; JSON by default.
    """

    def __init__(self, source: Source, name: str, *, codec: Codec[T] = json_codec) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self._semaphore = source.semaphore(name)
        self._codec = codec

    def __repr__(self) -> str:
        """Return the class and the name."""
        return f"<SharedConfig {self.name!r}>"

    async def get(self) -> T | None:
        """Return the current value; ``None`` when nothing has been published.

        Raises:
            InvalidArgument: the value cannot be decoded, or it is not a shared configuration.
            SessionExpired, SessionClosed: the session has ended.
        """
        try:
            described = await self._semaphore.describe()
        except SemaphoreNotFound:
            return None
        if described.ephemeral or described.limit != 1:
            raise self._not_a_config(described.limit)
        return self._decoded(described)

    async def set(self, value: T) -> None:
        """Publish a value; subscribers get it unless its bytes are the current ones.

        Raises:
            InvalidArgument: the value cannot be encoded, or has more than 1 MiB; or a semaphore of
                another limit, or a mutex, has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        data = self._encoded(value)
        await self._create()
        await self._semaphore.update(data)

    def watch(self) -> States[T | None]:
        """Return the current value and every newer one; ``None`` before the first.

        A value that cannot be decoded raises `InvalidArgument`, which ends the ``async for`` loop
        but not the watch: the next iteration waits for the next value. The watch ends with
        `SemaphoreNotFound` when the semaphore is deleted.
        """
        return States(self._semaphore.watch(data=True), self._decoded, self._create)

    async def _create(self) -> None:
        try:
            await self._semaphore.create(1, exist_ok=True)
        except SemaphoreExists as error:
            raise self._not_a_config(error.limit) from None

    def _encoded(self, value: T) -> bytes:
        try:
            data = self._codec.encode(value)
        except Exception as error:
            raise self._invalid(f"a value for {self} cannot be encoded: {error}") from error
        if not data:
            raise self._invalid(
                f"a value for {self} was encoded to no bytes: these mean 'no value'"
            )
        return data

    def _decoded(self, described: SemaphoreDescription) -> T | None:
        if not described.data:
            return None
        try:
            return self._codec.decode(described.data)
        except Exception as error:
            raise self._invalid(
                f"the value of {self} cannot be decoded ({error}); was it published with another "
                "codec?"
            ) from error

    def _not_a_config(self, limit: int | None) -> InvalidArgument:
        return self._invalid(
            f"{self.name!r} on {self._semaphore.node} is a semaphore of limit {limit}, and is "
            "used here as a shared configuration (a lasting one of limit 1); use another name for "
            "one of the two"
        )

    def _invalid(self, message: str) -> InvalidArgument:
        return InvalidArgument(message, node=self._semaphore.node, name=self.name)

    def __str__(self) -> str:
        """Return the name and the node for a message."""
        return f"the shared configuration {self.name!r} on {self._semaphore.node}"
