"""Table of the keys of one dflockd listener, which counts them against the server's limits.

A key of limit 1 is an ephemeral semaphore, counted from its first claim. A key of another limit is
a lasting one, counted when it is created in the store (`KeyTable.make`).
"""

from __future__ import annotations

import logging

from tenure.engines.contract import EngineSession
from tenure.errors import InvalidArgument
from tenure.server.auth.accounts import Account
from tenure.server.auth.guard import REFUSALS
from tenure.server.context import Context
from tenure.server.dflockd.claims import MARK, Key
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import LimitReached
from tenure.wire.lines.replies import ERROR_LIMIT_MISMATCH, ERROR_MAX_LOCKS


class KeyTable(dict[str, Key]):
    """Keys by name.

    Args:
        context: the server's context.
        options: the listener's options.
    """

    def __init__(self, context: Context, options: DflockdOptions) -> None:
        super().__init__()
        self._context = context
        self._node = options.node
        self._limited = options.max_locks is not None
        self._most = options.max_locks or context.limits.semaphores
        self._semaphores = context.counts.semaphores

    def add(self, name: str, limit: int, now: float, account: Account) -> Key | None:
        """Add an unknown key; return ``None`` if the limit is reached."""
        if len(self) >= self._most and (self._limited or account.semaphores.alone):
            return None
        key = Key(name, limit, now)
        if limit == 1:
            try:
                self._semaphores.join(self._node, key.stored, ephemeral=True, account=account)
            except LimitReached as error:
                self._context.log(logging.WARNING, "lock refused", limit=error.limit)
                return None
        self[name] = key
        return key

    def found(self, name: str, limit: int, now: float) -> Key:
        """Add a key that is already in use, regardless of the limit."""
        self[name] = key = Key(name, limit, now)
        if limit == 1:
            self._semaphores.rejoin(self._node, key.stored, ephemeral=True)
        else:
            key.made = True
        return key

    def forget(self, key: Key) -> None:
        """Remove a key without claims that is not in the store, or whose semaphore is unknown."""
        if self.get(key.name) is key and not key.claims:
            del self[key.name]
            if key.limit == 1:
                self._semaphores.leave(self._node, key.stored)

    async def make(self, key: Key, session: EngineSession, account: Account) -> bytes:
        """Create a key's lasting semaphore, unless it exists.

        Returns:
            The reply if it cannot be created, else an empty one.
        """
        name = key.stored
        try:
            async with self._semaphores.creating(self._node, name, account):
                await session.create_semaphore(name, key.limit, MARK, exist_ok=True)
        except LimitReached as error:
            self._context.log(logging.WARNING, "lock refused", limit=error.limit)
            self.forget(key)
            return ERROR_MAX_LOCKS
        except InvalidArgument:
            self.forget(key)  # it exists as a mutex, or with another limit
            return ERROR_LIMIT_MISMATCH
        except REFUSALS:
            raise
        except BaseException:
            key.made = True  # if it exists: it is deleted later, otherwise a request notices
            raise
        key.made = True
        return b""
