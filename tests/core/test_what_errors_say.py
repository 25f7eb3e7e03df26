"""Every error of the core, to the letter: what happened, on which node and name, what to do.

What an error says is what a user has at three in the morning, and a program acts on its `node`
and `name`; so both are held here, for each error and each way to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tenure.core import rules
from tenure.core.node import StoredSession
from tenure.core.store import ENDED, Store
from tenure.errors import (
    AuthenticationFailed,
    InvalidArgument,
    LeaseReleased,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, NodeConfig, Unchanged

HUGE = b"x" * (rules.DATA_BYTES + 1)
OF_DATA = (
    "data has at most 1048576 bytes, this has 1048577; store it elsewhere and keep its address here"
)
OF_KIND = (
    "'mutex' on /app is an ephemeral semaphore in use (a mutex, a registry), and is used here as "
    "a lasting one (a semaphore, an election, a config); use another name for one of the two"
)
OF_COUNT = "a count is a whole number from 1 to the limit, which is 4, not 0"
OF_NAME = "a name has 1 to 1024 bytes, this one 0"
OF_PATH = "a node's path starts with '/': 'app'"


class Scene:
    """A node with a semaphore of limit 4 whose owner has 2, a mutex, and a session."""

    def __init__(self) -> None:
        self.store = Store()
        self.store.create_node("/app", NodeConfig(), exist_ok=False)
        self.node = self.store.node("/app")
        self.session = self.attach()
        self.store.create(self.node, "pool", 4, b"", exist_ok=False)
        self.enqueue("pool", 2, hold=1)
        self.enqueue("mutex", EPHEMERAL_LIMIT, ephemeral=True, hold=2)

    def attach(self, path: str = "/app", **other: Any) -> StoredSession:
        asked = {"description": "", "window": 10.0, "liveness": "window", "key": b"key"} | other
        return self.store.attach(path, now=0.0, **asked)  # type: ignore[arg-type]

    def enqueue(
        self,
        name: str,
        count: int = 1,
        *,
        data: bytes = b"",
        timeout: float | None = None,
        ephemeral: bool = False,
        hold: int = 9,
    ) -> None:
        self.store.enqueue(
            self.session, hold, name, count, data, timeout, ephemeral, 0.0, order_id=hold
        )

    def alter(
        self,
        *,
        hold: int = 1,
        count: int | None = None,
        data: bytes | None = None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> None:
        self.store.alter(self.session, hold, count, data, 0.0, timeout)

    def ended(self) -> Scene:
        self.store.close(self.session, 0.0)
        return self


Call = Callable[[Scene], object]

NODE: list[tuple[Call, type[TenureError], str | None, str]] = [
    (
        lambda s: s.store.node("/b"),
        NodeNotFound,
        "/b",
        "there is no node /b. Create it with client.create_node('/b') or 'tenure node create /b'",
    ),
    (
        lambda s: s.store.create_node("/app", NodeConfig(), exist_ok=False),
        NodeExists,
        "/app",
        "the node /app exists already",
    ),
    (
        lambda s: s.store.drop_node("/app", force=False),
        NodeBusy,
        "/app",
        (
            "the node /app has 1 attached session(s). Close them, or drop it by force, which "
            "expires them"
        ),
    ),
    (
        lambda s: s.store.drop_node("/default", force=True),
        InvalidArgument,
        "/default",
        "the node /default cannot be dropped",
    ),
    (
        lambda s: s.attach(window=0.5),
        InvalidArgument,
        "/app",
        "a recovery window is 1 to 1800 seconds, not 0.5",
    ),
    (
        lambda s: s.attach(description="x" * 1025),
        InvalidArgument,
        "/app",
        "a session's description has at most 1024 bytes, this has 1025",
    ),
    (
        lambda s: s.attach(description=7),
        InvalidArgument,
        "/app",
        "a session's description is a str, not int",
    ),
    (
        lambda s: s.attach(description="\ud800"),
        InvalidArgument,
        "/app",
        "a session's description is valid Unicode text: '\\ud800'",
    ),
    (
        lambda s: s.attach(key=b"x" * 17),
        InvalidArgument,
        "/app",
        "a protection key has at most 16 bytes, this has 17",
    ),
    (
        lambda s: s.store.take_over("/app", 7, b""),
        SessionExpired,
        "/app",
        "session 7 on /app has ended and cannot be resumed: open a new one",
    ),
    (
        lambda s: s.store.take_over("/app", 1, b"no"),
        AuthenticationFailed,
        "/app",
        "session 1 on /app has another key than this resume token",
    ),
    (
        lambda s: s.store.take_over("/app", s.attach(liveness="process").id, b"key"),
        InvalidArgument,
        "/app",
        ("session 2 on /app ends with its process; open a resumable one with resumable=True"),
    ),
    (
        lambda s: s.ended().enqueue("pool"),
        SessionExpired,
        "/app",
        "the session on /app has ended",
    ),
    (
        lambda s: s.alter(hold=3),
        LeaseReleased,
        "/app",
        "the request on /app has ended",
    ),
    (
        lambda s: rules.check_name(7, "/app"),  # type: ignore[arg-type]
        InvalidArgument,
        "/app",
        "a name is a str, not int",
    ),
    (
        lambda s: rules.check_name("\ud800", "/app"),
        InvalidArgument,
        "/app",
        "a name is valid Unicode text: '\\ud800'",
    ),
    (
        lambda s: rules.check_path(7),  # type: ignore[arg-type]
        InvalidArgument,
        None,
        "a node's path is a str, not int",
    ),
    (
        lambda s: rules.check_path("/" + "x" * 1024),
        InvalidArgument,
        "/" + "x" * 1024,
        "a node's path has at most 1024 bytes, this one 1025",
    ),
    (
        lambda s: rules.check_path("/a/"),
        InvalidArgument,
        "/a/",
        "a node's path has no empty segment and no '/' at its end: '/a/'",
    ),
    (
        lambda s: rules.check_path("/ä" + "x" * 90),
        InvalidArgument,
        "/ä" + "x" * 90,
        f"segment {'ä' + 'x' * 79!r} of a node's path: 1 to 255 characters of A-Z a-z 0-9 . _ -",
    ),
    *(
        (call, InvalidArgument, "app", OF_PATH)
        for call in (
            lambda s: s.store.create_node("app", NodeConfig(), exist_ok=False),
            lambda s: s.store.drop_node("app", force=True),
            lambda s: s.attach("app"),
            lambda s: s.store.take_over("app", 1, b"key"),
        )
    ),
]
"""(what is done, the error, its node, its text), for errors that are not of one name."""

NAMED: list[tuple[Call, type[TenureError], str, str]] = [
    *(
        (call, InvalidArgument, name, text)
        for name, text, calls in (
            (
                "pool",
                OF_DATA,
                [
                    lambda s: s.store.update(s.node, "pool", HUGE),
                    lambda s: s.enqueue("pool", data=HUGE),
                    lambda s: s.alter(data=HUGE),
                ],
            ),
            ("new", OF_DATA, [lambda s: s.store.create(s.node, "new", 1, HUGE, exist_ok=False)]),
            (
                "pool",
                "data is bytes, not str: pass text.encode()",
                [lambda s: s.alter(data="text")],
            ),
            (
                "new",
                "a limit is a whole number from 1 to 2^64-1, not 0",
                [
                    lambda s: s.store.create(s.node, "new", 0, b"", exist_ok=False),
                ],
            ),
            (
                "pool",
                "a limit is changed to a whole number from 1 to 2^53-1, not 9007199254740992",
                [lambda s: s.store.resize(s.node, "pool", 2**53, 0.0)],
            ),
            ("pool", OF_COUNT, [lambda s: s.enqueue("pool", 0), lambda s: s.alter(count=0)]),
            (
                "new",
                f"a count is a whole number from 1 to the limit, which is {2**64 - 1}, not 0",
                [
                    lambda s: s.enqueue("new", 0, ephemeral=True),
                ],
            ),
            (
                "new",
                (
                    f"a count is at most 2^53-1 unless it is the whole limit ({2**64 - 1}), "
                    f"not {2**53}"
                ),
                [lambda s: s.enqueue("new", 2**53, ephemeral=True)],
            ),
            (
                "pool",
                (
                    "a request cannot grow from 2 to 3: it would overtake those behind it; "
                    "acquire the difference with a second request"
                ),
                [lambda s: s.alter(count=3)],
            ),
            (
                "pool",
                "a timeout is zero or more seconds, or None, not -1",
                [
                    lambda s: s.enqueue("pool", timeout=-1),
                    lambda s: s.alter(timeout=-1),
                ],
            ),
            (
                "mutex",
                OF_KIND,
                [
                    lambda s: s.store.create(s.node, "mutex", 4, b"", exist_ok=True),
                    lambda s: s.store.resize(s.node, "mutex", 4, 0.0),
                    lambda s: s.enqueue("mutex"),
                ],
            ),
            (
                "pool",
                (
                    "'pool' on /app is a lasting semaphore, and is used here as an ephemeral one "
                    "(a mutex, a registry); use another name for one of the two"
                ),
                [lambda s: s.enqueue("pool", ephemeral=True)],
            ),
            (
                "",
                OF_NAME,
                [
                    lambda s: s.store.create(s.node, "", 4, b"", exist_ok=True),
                    lambda s: s.store.watch(s.session, "", data=True, owners=True, sink=None),
                    lambda s: s.store.update(s.node, "", b""),
                    lambda s: s.store.resize(s.node, "", 4, 0.0),
                    lambda s: s.enqueue("", ephemeral=True),
                ],
            ),
            (
                "x" * 80,
                "a name has 1 to 1024 bytes, this one 1025",
                [
                    lambda s: rules.check_name("x" * 1025, "/app"),
                ],
            ),
        )
        for call in calls
    ),
    (
        lambda s: s.store.create(s.node, "pool", 5, b"", exist_ok=True),
        SemaphoreExists,
        "pool",
        "'pool' on /app exists already, with limit 4",
    ),
    (
        lambda s: s.store.delete(s.node, "pool", force=False),
        SemaphoreBusy,
        "pool",
        (
            "'pool' on /app has owners or waiters. Release it, or delete it by force, which "
            "removes them"
        ),
    ),
    *(
        (call, SemaphoreNotFound, "no", "there is no semaphore 'no' on /app. Create it first")
        for call in (
            lambda s: s.store.update(s.node, "no", b""),
            lambda s: s.store.delete(s.node, "no", force=True),
            lambda s: s.store.evict(s.node, "no", 1, 0.0),
            lambda s: s.enqueue("no"),
        )
    ),
]
"""(what is done, the error, its name, its text), for errors of one name on /app."""


@pytest.mark.parametrize(("call", "error", "node", "text"), NODE)
def test_an_error_says_which_node_it_is_about(
    call: Call, error: type[TenureError], node: str | None, text: str
) -> None:
    with pytest.raises(error) as raised:
        call(Scene())
    assert (str(raised.value), raised.value.node, raised.value.name) == (text, node, None)


@pytest.mark.parametrize(("call", "error", "name", "text"), NAMED)
def test_an_error_about_a_name_says_which_and_on_which_node(
    call: Call, error: type[TenureError], name: str, text: str
) -> None:
    with pytest.raises(error) as raised:
        call(Scene())
    assert (str(raised.value), raised.value.node, raised.value.name) == (text, "/app", name)


def test_a_full_node_says_how_many_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SESSIONS_PER_NODE", 1)
    monkeypatch.setattr(rules, "SEMAPHORES_PER_NODE", 2)
    scene = Scene()
    with pytest.raises(InvalidArgument) as of_sessions:
        scene.attach()
    assert str(of_sessions.value) == "the node /app has 1 sessions, the maximum"
    assert (of_sessions.value.node, of_sessions.value.name) == ("/app", None)
    with pytest.raises(InvalidArgument) as of_semaphores:
        scene.enqueue("third", ephemeral=True)
    assert str(of_semaphores.value) == "the node /app has 2 semaphores, the maximum"
    assert (of_semaphores.value.node, of_semaphores.value.name) == ("/app", "third")


def test_a_session_that_was_taken_over_is_told_by_what() -> None:
    error = rules.taken_over("/app")
    assert str(error) == (
        "the session on /app was taken over: another program has resumed it with its token"
    )
    assert (error.node, error.taken_over) == ("/app", True)


def test_a_session_is_told_why_it_ended() -> None:
    dropped = Scene()
    dropped.store.drop_node("/app", force=True)
    assert dropped.store.effects == [(dropped.session, ENDED, "the node /app was dropped")]
    silent = Scene()
    silent.store.expire(10.0)
    assert silent.store.effects == [
        (silent.session, ENDED, "it was silent for its recovery window of 10 s")
    ]
