"""A store with a bit of everything, and a call of each function in it, which is undone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from tenure.core import rules
from tests.engines.postgresql.stepping import NODE, Actor, Store, a_store, arguments

_PASSING = frozenset({"TN001", "55P03"})
"""Codes of errors after which the engine sends the call again."""
_WAITS = 600.0


@dataclass
class Scenario:
    """A store with a bit of everything.

    Attributes:
        owner: owns the mutex "m", with request 1.
        waiter: waits for it, with request 1.
        expired: owns the mutex "d", with request 1.
        taken: its session was taken over, which is not completed.
        caller: makes the calls of the test, each in a transaction that is rolled back.
        admin: maintains the tables.
        other: holds locks, or looks for them.
        lease: order id of the owner's request.
        epoch: of the store.
    """

    store: Store
    owner: Actor
    waiter: Actor
    expired: Actor
    taken: Actor
    caller: Actor
    admin: Actor
    other: Actor
    lease: int
    epoch: str

    async def call(self, function: str) -> Any:
        """Call a function in a transaction, and undo what it does."""
        await self.caller.begin()
        try:
            return await self.caller.call(function, *CALLS[function](self))
        except psycopg.Error as error:
            if error.sqlstate not in _PASSING:
                raise
        finally:
            await self.caller.execute("ROLLBACK")


@contextlib.asynccontextmanager
async def a_scenario() -> AsyncIterator[Scenario]:
    async with a_store() as store:
        owner, waiter, expired, taken = [await store.actor(window=_WAITS) for _ in range(4)]
        caller, admin, other = [await store.actor(window=None) for _ in range(3)]
        lease = await owner.lock("m")
        await waiter.operate(waiter.operation("m", "m"))
        await expired.lock("d")
        await expired.execute(
            "UPDATE SCHEMA.sessions SET seen = 'epoch' WHERE id = %s", expired.session
        )
        take_over = NODE, taken.session, "secret", caller.channel, "", None
        _, taken.token, *_ = await caller.call("take_over", *take_over)
        await owner.call("change", *_change(owner, 1, "create", ["s", "2", "", True, 100]))
        await caller.call("create_node", "/empty", "{}")
        for actor in (caller, admin, other):
            await actor.execute("SET deadlock_timeout = '10ms'")
            await actor.execute("SET statement_timeout = '20s'")
        ((epoch,),) = await caller.execute("SELECT epoch FROM SCHEMA.meta")
        yield Scenario(
            *(store, owner, waiter, expired, taken, caller, admin, other), lease=lease, epoch=epoch
        )


def _change(actor: Actor, number: int, kind: str, args: list[Any]) -> tuple[Any, ...]:
    return actor.session, actor.token, number, kind, args, actor.channel, False


def _single(actor: Actor, number: int, name: str) -> tuple[Any, ...]:
    return actor.channel, 0, False, actor.session, actor.token, number, name


CALLS: dict[str, Callable[[Scenario], tuple[Any, ...]]] = {
    "acknowledge": lambda s: (s.taken.session, [f"1.{s.taken.channel}"], ""),
    "acquire": lambda s: (*_single(s.owner, 2, "m"), None),
    "alter_node": lambda s: (NODE, "{}", "{}"),
    "attach": lambda s: (
        *(NODE, "1.new", s.caller.channel, _WAITS + 1, "", "window", "", rules.SESSIONS_PER_NODE),
    ),
    "begin_session": lambda s: (s.taken.session, s.taken.token, ""),
    "change": lambda s: _change(s.owner, 2, "alter", ["m", 1, None, "", "-"]),
    "create_node": lambda s: ("/other", "{}"),
    "data_was_restored": lambda s: (),
    "describe": lambda s: (NODE, None, "all"),
    "describe_node": lambda s: (NODE,),
    "drop_node": lambda s: (NODE, True, s.caller.channel),
    "end_session": lambda s: (NODE, s.owner.session, s.caller.channel),
    "evict": lambda s: (NODE, "m", s.lease, s.caller.channel),
    "examine": lambda s: (),
    "expire": lambda s: ([s.expired.session], s.caller.channel),
    "guard": lambda s: (NODE, "m", s.lease),
    "hello": lambda s: (True, True),
    "leave": lambda s: (s.owner.session, [s.owner.token], False, s.owner.channel, False),
    "list_nodes": lambda s: (),
    "list_sessions": lambda s: (NODE,),
    "look": lambda s: ([[s.owner.session, s.owner.token, [1]]],),
    "operate": lambda s: (
        *(s.owner.channel, 0, False),
        *arguments(
            [(s.owner.session, s.owner.token)],
            [[1, "m", 2, "new"], [1, "w", 1, "m"], [1, "m", 3, "m"]],
            ["new"],
        ),
        False,
    ),
    "rate": lambda s: (*(NODE, "r", "take", 1, 60_000_000, 1, 60_000_000, 1, None, 0, False),),
    "reattach": lambda s: (s.owner.channel, [[s.owner.session, [s.owner.token], "1.again"]], "x"),
    "release": lambda s: _single(s.owner, 1, "m"),
    "remaining": lambda s: (s.taken.session, s.taken.token),
    "renew": lambda s: (False, [[s.owner.session, s.owner.token]], s.epoch),
    "store_time": lambda s: (),
    "take_over": lambda s: (NODE, s.owner.session, "another", s.caller.channel, "", _WAITS + 1),
    "tick": lambda s: (
        *(s.caller.channel, [[NODE, "d"], [NODE, "m"]], [[NODE, "watched", "tenure_q"]]),
    ),
    "turn_over": lambda s: (
        *(s.owner.channel, 0, False, s.owner.session, s.owner.token),
        *("m", "{1}", "{2}", "{NULL}", "{}"),
    ),
    "watch": lambda s: (s.owner.session, s.owner.token, "m", "tenure_q"),
}
"""The arguments of each function that programs call."""
