"""Notices during the wait: the holder, and the place in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import tenure
from tenure.cli.look import describe_program, program
from tenure.cli.output import duration, safe

FIRST = 1.0
"""Seconds of waiting before the first notice."""

INTERVAL = 5.0
"""Seconds between two reads of the queue after that."""


class Notices:
    """Lines for the user about a waiting request.

    Attributes:
        session: the session of the request, once attached.
    """

    def __init__(
        self, client: tenure.Client, name: str, node: str, say: Callable[[str], None]
    ) -> None:
        """Initialise; nothing is reported yet."""
        self.session: tenure.Session | None = None
        self._client = client
        self._name = name
        self._node = node
        self._say = say
        self._latest: object = self  # the line printed last, if any

    async def follow(self) -> NoReturn:
        """Print a line whenever the holder or the place has changed."""
        pause = FIRST
        while True:
            await asyncio.sleep(pause)
            pause = INTERVAL
            try:
                described = await self._client.describe_semaphore(self._name, self._node)
            except tenure.SemaphoreNotFound:
                continue  # it is being handed from one holder to the next
            except tenure.Unsupported:
                self._print(None, "")  # the store lists no holders
                continue
            except tenure.TenureError as error:
                self._print(type(error), f": {error}")
                continue
            place = self._place(described)
            about = ([owner.order_id for owner in described.owners], place)
            self._print(about, held_by(described) + place)

    def _place(self, described: tenure.SemaphoreDescription) -> str:
        session = None if self.session is None else self.session.id
        for at, waiter in enumerate(described.waiters, 1):
            if waiter.session_id == session:
                return f"; place {at} of {len(described.waiters)} in the queue"
        return ""

    def _print(self, about: object, text: str) -> None:
        if about != self._latest:
            self._latest = about
            self._say(f"waiting for {self._name!r} on {self._node}{text}")


def held_by(described: tenure.SemaphoreDescription) -> str:
    """Describe the holders, as the end of a message; empty when none is known."""
    if not described.owners:
        return ""
    first = described.owners[0]
    since = "" if first.since is None else f" for {duration(first.since)}"
    more = f" and {len(described.owners) - 1} more" if len(described.owners) > 1 else ""
    return f": held by {describe_program(first)}{since}{more}"


async def describe_holder(client: tenure.Client, name: str, node: str) -> tuple[str, str]:
    """Describe the holders and the number of waiters, if they can still be read."""
    try:
        described = await client.describe_semaphore(name, node)
    except tenure.TenureError:
        return "", ""
    if not described.owners:
        return "", ""
    return held_by(described), f", {len(described.waiters)} waiting"


def runner(last: tenure.LastRun) -> str:
    """Name the program that ran a job: ``tenure run backup.sh, pid 4242 on db-1``."""
    process = "" if last.pid is None else f"pid {last.pid}"
    name = ", ".join(filter(None, (program(last), process))) or "an unknown program"
    return f"{name} on {safe(last.host)}" if last.host else name
