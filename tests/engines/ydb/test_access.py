"""Who may come in, and over what: credentials, TLS, and what a server refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Place
from tenure.engines.ydb import connect, joining
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    NodeBusy,
    TenureError,
    Unsupported,
)
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, NodeConfig
from tenure.server.limits import Limits
from tenure.server.tls import TlsFiles
from tenure.testing.recorder import Recorder
from tests.engines.ydb.behind import Server, in_memory
from tests.server.certificates import Authority

TOKEN = "correct-horse-battery-staple"


@contextlib.contextmanager
def serving(**how: Any) -> Iterator[Server]:
    with in_memory() as store:
        server = Server(store, **how)
        server.start()
        try:
            yield server
        finally:
            server.stop()


async def use(url: str) -> None:
    """Connect, and lock something."""
    engine = connect(url, SystemClock())
    await engine.open()
    try:
        session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
        answer: Any = session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=0, ephemeral=True)
        assert (await answer).place is Place.GRANTED
    finally:
        await engine.aclose()


@pytest.fixture
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("YDB_ANONYMOUS_CREDENTIALS", "YDB_ACCESS_TOKEN_CREDENTIALS", "YDB_USER"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


async def test_a_token_in_the_url_lets_in(nothing_in_the_environment: object) -> None:
    with serving(tokens={TOKEN: "anna"}) as server:
        await use(f"{server.url}?token={TOKEN}")


async def test_a_token_in_the_environment_lets_in(
    nothing_in_the_environment: pytest.MonkeyPatch,
) -> None:
    nothing_in_the_environment.setenv("YDB_ACCESS_TOKEN_CREDENTIALS", TOKEN)
    with serving(tokens={TOKEN: "anna"}) as server:
        await use(server.url)
        with pytest.raises(AuthenticationFailed):
            await use(f"{server.url}?credentials=anonymous")


async def test_a_wrong_token_is_refused_and_not_repeated(
    nothing_in_the_environment: object,
) -> None:
    with serving(tokens={TOKEN: "anna"}) as server:
        for url in (f"{server.url}?token=wrong-{TOKEN}", server.url):
            for options in ("", "&discovery=off" if "?" in url else "?discovery=off"):
                with pytest.raises(AuthenticationFailed) as caught:
                    await use(url + options)
                assert TOKEN not in str(caught.value)


async def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("db.example.org")
    with serving(tls=TlsFiles(pair.cert, pair.key)) as server:
        await use(f"{server.url}?root_certificates={authority.cert}")
        stranger = Authority(tmp_path, "stranger")
        with pytest.raises(EngineUnavailable, match="tls_ca=FILE"):
            await use(f"{server.url}?root_certificates={stranger.cert}&connect_timeout=1")


async def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere\.pem"):
        await use("ydbs://127.0.0.1:1/local?root_certificates=/nowhere.pem")


async def test_another_database_is_not_served() -> None:
    with serving() as server:
        url = server.url.replace("/local", "/elsewhere")
        with pytest.raises(TenureError):
            await use(f"{url}?connect_timeout=1")


async def test_what_a_server_will_not_hold_is_an_error_that_says_why() -> None:
    with serving(limits=Limits(requests_per_session=1)) as server:
        engine = connect(server.url, SystemClock())
        await engine.open()
        session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
        for hold, name in ((1, "a"), (2, "b")):
            answer: Any = session.enqueue(hold, name, 1, b"", timeout=None, ephemeral=True)
            if hold == 2:
                with pytest.raises(EngineError, match="requests_per_session"):
                    await answer
            else:
                await answer
        released: Any = session.withdraw(1)
        await released
        again: Any = session.enqueue(3, "b", 1, b"", timeout=None, ephemeral=True)
        assert (await again).place is Place.GRANTED
        await engine.aclose()


async def test_there_are_only_so_many_siblings() -> None:
    with serving() as server:
        engine = connect(f"{server.url}?siblings=1", SystemClock())
        await engine.open()
        session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
        for hold in (1, 2):
            answer: Any = session.enqueue(hold, "m", 1, b"", timeout=None, ephemeral=True)
            assert (await answer).place is Place.GRANTED
        third: Any = session.enqueue(3, "m", 1, b"", timeout=None, ephemeral=True)
        with pytest.raises(Unsupported, match="siblings=1"):
            await third
        released: Any = session.withdraw(1)
        await released
        fourth: Any = session.enqueue(4, "m", 1, b"", timeout=None, ephemeral=True)
        assert (await fourth).place is Place.GRANTED
        await engine.aclose()


async def test_grants_have_their_tokens_whether_or_not_the_names_were_contended_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "_MOST_CONTENDED", 1)  # so that one of two is not remembered
    with serving() as server:
        engine = connect(server.url, SystemClock())
        await engine.open()
        heard = Recorder()
        session = await engine.attach(Attach(DEFAULT_NODE, 30.0), heard)

        def lock(hold: int, name: str) -> Any:
            heard.sending(hold)
            return session.enqueue(hold, name, EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)

        async def told(hold: int) -> int | None:
            await heard.wait_for(lambda heard: heard.grants.get(hold) is not None, "the token")
            return heard.grants[hold]

        tokens = []
        for number, name in enumerate("abab"):
            first, second = 2 * number + 1, 2 * number + 2
            tokens.append((await lock(first, name)).order_id)
            assert (await lock(second, name)).place is Place.WAITING
            released: Any = session.withdraw(first)
            tokens.append(await told(second))
            await released
            released = session.withdraw(second)
            await released
        assert all(tokens)
        assert tokens == sorted(tokens)
        await engine.aclose()


async def test_without_fencing_a_grant_has_no_order_id() -> None:
    with serving() as server:
        engine = connect(f"{server.url}?fencing=off", SystemClock())
        assert not engine.capabilities.fencing
        await engine.open()
        heard = Recorder()
        session = await engine.attach(Attach(DEFAULT_NODE, 30.0), heard)
        for hold in (1, 2):
            answer: Any = session.enqueue(
                hold, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True
            )
            heard.sending(hold)
            assert (await answer).order_id is None
        released: Any = session.withdraw(1)
        await released
        await heard.wait_for(lambda heard: 2 in heard.grants, "the grant")
        assert heard.grants == {2: None}
        await engine.aclose()


async def test_what_the_api_does_not_offer_is_refused_with_who_does() -> None:
    with serving() as server:
        engine = connect(server.url, SystemClock())
        await engine.open()
        window = Attach(DEFAULT_NODE, 30.0, liveness="window")
        for attempt in (
            engine.list_nodes(),
            engine.list_sessions(DEFAULT_NODE),
            engine.list_semaphores(DEFAULT_NODE, owners=True, waiters=True),
            engine.end_session(DEFAULT_NODE, 1),
            engine.evict(DEFAULT_NODE, "m", 1),
            engine.attach(window, Recorder()),
        ):
            with pytest.raises(Unsupported, match="sqlite://"):
                await attempt
        await engine.create_node("/n", NodeConfig(), exist_ok=False)
        session = await engine.attach(Attach("/n", 30.0), Recorder())
        assert not engine.capabilities.resize
        with pytest.raises(Unsupported, match=r"sqlite://.* create it with limit 4"):
            await session.resize_semaphore("s", 4)
        with pytest.raises(NodeBusy):
            await engine.drop_node("/n", force=False)
        with pytest.raises(Unsupported, match="by force"):
            await engine.drop_node("/n", force=True)
        await engine.aclose()
