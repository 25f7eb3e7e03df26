"""Records that are deleted in the store of a running system, one kind at a time.

An administrator's `DEL`, an eviction, the `TRUNCATE` of a test suite, a restored table: whatever
deletes a record, its holder is notified within its window, its waiters are granted in turn, and no
program sees an error that is not tenure's. `docs/evidence/lost-data.md` has the table.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
import redis

import tenure
from tenure.cli.app import invoke
from tenure.cli.mistakes import Status
from tenure.engines.etcd.url import parse as parse_etcd
from tenure.engines.redis.url import parse as parse_redis
from tenure.model import EPHEMERAL_LIMIT
from tests.clean_up import clean_up_with
from tests.engines.dflockd.servers import InThread
from tests.engines.etcd import servers as etcd
from tests.engines.postgresql import servers as postgresql
from tests.engines.redis import servers as redis_servers
from tests.engines.stores import a_file, a_name_in_memory
from tests.engines.ydb.behind import Server as YdbServer
from tests.server.served import Served, served

WINDOW = 1.5
PATIENCE = 45.0
LATE = 10.0  # seconds by which a busy machine may be late; far less than PATIENCE


@dataclass(frozen=True)
class Place:
    """What is deleted: records of this lease in this store.

    Attributes:
        url: of the store.
        session: the id of the holder's session.
        token: the fencing token of its lease.
    """

    url: str
    session: int
    token: int


@dataclass(frozen=True)
class Kind:
    """A kind of records, and what its loss means.

    Attributes:
        engine: whose store has it.
        what: is deleted.
        delete: deletes it with the client of the store.
        kept: the holder keeps its lease, because nothing of it is lost.
        released: it can still be released, because its request is in the queue.
        granted_again: a new program may be granted before the holder is notified.
        unusable: the store has to be created again; until then every call fails.
        usual: it is tested in each run, and not at night alone.
        through: the scheme of the server through which the programs use the store, if any.
    """

    engine: str
    what: str
    delete: Callable[[Place], None]
    kept: bool = False
    released: bool = False
    granted_again: bool = False
    unusable: bool = False
    usual: bool = False
    through: str = ""

    @property
    def title(self) -> str:
        """Its name in the names of tests."""
        return "-".join(each for each in (self.through, self.engine, self.what) if each)


def sql(text: str) -> Callable[[Place], None]:
    """Run SQL in PostgreSQL; S stands for the schema."""

    def delete(place: Place) -> None:
        schema = place.url.rpartition("schema=")[2]
        known = {"session": place.session, "token": place.token}
        postgresql.shared().execute(text.format(S=schema, **known))

    return delete


def redis_command(*words: str) -> Callable[[Place], None]:
    """Run a command of Redis; P stands for the prefix of the keys."""

    def delete(place: Place) -> None:
        address = parse_redis(place.url)
        path = address.places[0]
        assert isinstance(path, str)
        known = {"session": place.session, "token": place.token}
        with redis.Redis(unix_socket_path=path) as client:
            # The prefix has braces itself.
            filled = [each.format(P=address.prefix, **known) for each in words]
            assert client.execute_command(*filled) not in (0, None)

    return delete


def etcd_keys(key: str) -> Callable[[Place], None]:
    """Delete the keys of etcd that begin with this; P stands for the prefix of the store."""

    def delete(place: Place) -> None:
        session = f"{place.session:016x}"
        first = key.format(P=parse_etcd(place.url).prefix, session=session).encode()
        found = etcd.shared().ask(
            "kv/deleterange",
            {
                "key": base64.b64encode(first).decode(),
                "range_end": base64.b64encode(first[:-1] + bytes([first[-1] + 1])).decode(),
            },
        )
        assert found.get("deleted"), found

    return delete


def revoke(place: Place) -> None:
    """Revoke the session's lease of etcd."""
    etcd.shared().revoke(place.session)


def rows(text: str) -> Callable[[Place], None]:
    """Run SQL in SQLite."""

    def delete(place: Place) -> None:
        with contextlib.closing(sqlite3.connect(urlsplit(place.url).path)) as connection:
            connection.execute(text.format(session=place.session, token=place.token))
            connection.commit()

    return delete


TABLES = "meta, witness, nodes, sessions, former, queues, requests, removals"

KINDS = (
    Kind("redis", "the session", redis_command("DEL", "{P}s:{session}")),
    Kind(
        *("redis", "the queue", redis_command("DEL", "{P}m:/default:m")),
        usual=True,
        granted_again=True,
    ),
    Kind("redis", "the owner in the queue", redis_command("HDEL", "{P}m:/default:m", "{token}")),
    Kind("redis", "the waiters", redis_command("DEL", "{P}w:/default:m"), kept=True),
    Kind("redis", "the request in the session", redis_command("HDEL", "{P}s:{session}", "1")),
    Kind("redis", "the nodes", redis_command("DEL", "{P}nodes"), kept=True),
    Kind("redis", "the list of sessions", redis_command("DEL", "{P}S:/default"), kept=True),
    Kind("redis", "the times of expiry", redis_command("DEL", "{P}x"), kept=True),
    Kind("redis", "the epoch", redis_command("DEL", "{P}meta"), kept=True),
    Kind("redis", "FLUSHALL", redis_command("FLUSHDB")),
    Kind("redis", "SCRIPT FLUSH", redis_command("SCRIPT", "FLUSH"), kept=True),
    Kind("sqlite", "the session", rows("DELETE FROM sessions WHERE id = {session}")),
    Kind(
        "sqlite", "the request", rows("DELETE FROM requests WHERE order_id = {token}"), usual=True
    ),
    Kind("sqlite", "the queue", rows("DELETE FROM requests"), granted_again=True),
    Kind("sqlite", "the node", rows("DELETE FROM nodes"), kept=True),
    Kind("sqlite", "the participants", rows("DELETE FROM participants"), kept=True),
    Kind("sqlite", "the meta data", rows("DELETE FROM meta"), unusable=True),
    *(
        Kind("sqlite", f"DROP TABLE {each}", rows(f"DROP TABLE {each}"), unusable=True)
        for each in ("meta", "nodes", "participants", "sessions", "semaphores", "requests", "news")
    ),
    Kind("etcd", "the session", etcd_keys("{P}s/:default/{session}")),
    Kind(
        *("etcd", "the request", etcd_keys("{P}q/:default/m/r/{session}")),
        usual=True,
        granted_again=True,
    ),
    Kind("etcd", "the queue", etcd_keys("{P}q/:default/m/"), granted_again=True),
    Kind("etcd", "the node", etcd_keys("{P}n/"), kept=True),
    Kind("etcd", "the base of the tokens", etcd_keys("{P}base"), kept=True),
    Kind("etcd", "the numbers of sessions", etcd_keys("{P}serial"), kept=True),
    Kind("etcd", "all keys", etcd_keys("{P}"), granted_again=True),
    Kind("etcd", "the lease", revoke),
    Kind("postgresql", "the session", sql("DELETE FROM {S}.sessions WHERE id = {session}")),
    Kind(
        *("postgresql", "the request", sql("DELETE FROM {S}.requests WHERE order_id = {token}")),
        usual=True,
    ),
    Kind("postgresql", "the queue", sql("DELETE FROM {S}.queues")),
    Kind("postgresql", "the node", sql("DELETE FROM {S}.nodes"), released=True),
    Kind("postgresql", "the meta data", sql("DELETE FROM {S}.meta"), kept=True),
    Kind("postgresql", "the witness", sql("DELETE FROM {S}.witness"), kept=True),
    *(
        Kind(
            *("postgresql", f"TRUNCATE {table}", sql(f"TRUNCATE {{S}}.{table}")),
            kept=kept,
            released=table == "nodes",
        )
        for table, kept in {
            "meta": True,
            "witness": True,
            "nodes": False,
            "sessions": False,
            "former": True,
            "queues": False,
            "requests": False,
            "removals": True,
        }.items()
    ),
    Kind(
        "postgresql",
        "TRUNCATE of all tables",
        sql("TRUNCATE " + ", ".join(f"{{S}}.{each}" for each in TABLES.split(", "))),
        usual=True,
    ),
    *(
        Kind(
            *("postgresql", f"DROP TABLE {table}", sql(f"DROP TABLE {{S}}.{table} CASCADE")),
            unusable=True,
        )
        for table in TABLES.split(", ")
        if table not in ("former", "removals")
    ),
    Kind("postgresql", "DROP FUNCTION renew", sql("DROP FUNCTION {S}.renew"), kept=True),
    Kind(
        *("postgresql", "DROP FUNCTION quarantine", sql("DROP FUNCTION {S}.quarantine")),
        unusable=True,
    ),
    Kind("postgresql", "DROP SCHEMA", sql("DROP SCHEMA {S} CASCADE")),
)

NODES = ("the node", "the nodes", "all keys", "FLUSHALL")

BEHIND_A_SERVER = tuple(
    replace(kind, through=scheme, usual=kind.engine == "sqlite" and kind.usual)
    for scheme in ("tenure", "ydb")
    for kind in KINDS
    if kind.what in ("the session", "the request", "the queue", "the lease", "the epoch")
    or kind.what in ("FLUSHALL", "all keys", "TRUNCATE of all tables")
)
"""Records that are deleted in the store of a server, whose clients must be notified."""

ALL = KINDS + BEHIND_A_SERVER


@contextmanager
def a_store(engine: str) -> Iterator[str]:
    """Yield the URL of an empty store."""
    if engine == "redis":
        with redis_servers.a_server() as server:
            yield f"{server.url}&max_window={WINDOW}"
    elif engine == "etcd":
        with etcd.a_prefix() as url:
            yield url
    elif engine == "postgresql":
        with postgresql.a_schema() as url:
            yield url
    else:
        with a_file() as url:
            yield url


@contextmanager
def a_server(scheme: str, store: str) -> Iterator[str]:
    """Yield the URL by which programs reach the store: its own, or that of a server on it."""
    if not scheme:
        yield store
    elif scheme == "tenure":
        with served(store) as server:
            yield server.address
    else:
        behind = YdbServer(store)
        behind.start()
        with clean_up_with(behind.stop):
            yield behind.url


@dataclass(frozen=True)
class Scene:
    """A holder of a mutex and a waiter for it, in two programs, and what is deleted.

    Attributes:
        lease: of the holder.
        waiting: of the waiter.
        url: of the store.
        other: the client of the waiter.
    """

    lease: tenure.Lease
    waiting: asyncio.Task[tenure.Lease]
    url: str
    other: tenure.Client


@contextlib.asynccontextmanager
async def a_scene(kind: Kind) -> AsyncIterator[Scene]:
    with a_store(kind.engine) as store, a_server(kind.through, store) as url:
        client, other = tenure.connect(url), tenure.connect(url)
        try:
            session = await client.session(recovery_window=WINDOW)
            lease = await session.mutex("m").lock()
            second = await other.session(recovery_window=WINDOW)
            waiting = asyncio.ensure_future(second.mutex("m").lock())
            await until_queued(second)
            kind.delete(Place(store, session.id, lease.fencing_token))
            yield Scene(lease, waiting, url, other)
            waiting.cancel()
            await asyncio.wait([waiting])
        finally:
            for each in (client, other):
                with contextlib.suppress(tenure.TenureError):
                    await each.aclose()


async def until_queued(session: tenure.Session) -> None:
    """Return when a request waits."""
    async with asyncio.timeout(PATIENCE):
        while not (await session.semaphore("m").describe(waiters=True)).waiters:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def parameters(kinds: tuple[Kind, ...]) -> list[object]:
    """Return the parameters of a test; those of unusual kinds run at night."""
    return [
        pytest.param(
            each,
            id=each.title,
            marks=() if each.usual else pytest.mark.exhaustive,
        )
        for each in kinds
    ]


def run_command(url: str, *words: str) -> tuple[int, str]:
    """Run `tenure`; return its exit code, and what it says."""
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"TENURE_URL": url}),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        return invoke(words), said.getvalue()


@pytest.mark.parametrize("kind", parameters(ALL))
async def test_a_record_that_is_deleted_is_lost_and_hangs_no_program(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_scene(kind) as scene:
        lease, waiting = scene.lease, scene.waiting
        if kind.kept:
            await asyncio.sleep(2 * WINDOW)  # nothing happens
            assert lease.held
            assert not waiting.done()
            await lease.release()
        else:
            async with asyncio.timeout(WINDOW + LATE):
                assert isinstance(await lease.wait_lost(), tenure.LeaseLost)
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(tenure.TenureError):
                await (await waiting).release()
        if not kind.kept:
            with pytest.raises(tenure.LeaseLost):
                await lease.release()
        for words in (["ls"], ["describe", "m"], ["doctor"]):
            code, said = await asyncio.to_thread(run_command, scene.url, *words)
            assert code in set(Status), said
            assert "Traceback" not in said
        try:
            async with (
                tenure.connect(scene.url) as third,
                third.session(recovery_window=WINDOW) as session,
                session.mutex("m").lock(timeout=PATIENCE) as later,
            ):
                assert later.fencing_token > lease.fencing_token
        except tenure.TenureError:
            assert kind.unusable
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("kind", parameters(ALL))
async def test_the_release_of_a_deleted_record_is_no_success(kind: Kind) -> None:
    async with a_scene(kind) as scene, asyncio.timeout(PATIENCE):
        if kind.unusable:  # the release is tried again
            with contextlib.suppress(tenure.EngineError):
                await scene.lease.release()
        elif kind.kept or kind.released:
            await scene.lease.release()
        else:
            with pytest.raises(tenure.LeaseLost):
                await scene.lease.release()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", parameters(tuple(each for each in ALL if not each.granted_again)))
async def test_a_new_program_grants_nothing_that_is_still_held(kind: Kind) -> None:
    async with a_scene(kind) as scene:
        with contextlib.suppress(tenure.TenureError):
            async with (
                tenure.connect(scene.url) as third,
                third.session(recovery_window=WINDOW) as session,
                session.mutex("m").lock(timeout=4 * WINDOW),
            ):
                assert not scene.lease.held
                assert not scene.waiting.done() or scene.waiting.exception() is not None


@pytest.mark.parametrize(
    "kind", [pytest.param(each, id=each.title) for each in KINDS if each.what in NODES]
)
async def test_a_running_program_finds_the_default_node_again(kind: Kind) -> None:
    with a_store(kind.engine) as url:
        async with tenure.connect(url) as client:
            async with client.session(recovery_window=WINDOW) as former:
                kind.delete(Place(url, former.id, 0))
                with contextlib.suppress(tenure.SessionExpired):
                    await former.aclose()
            async with client.session(recovery_window=WINDOW) as session:
                await (await session.mutex("m").lock(timeout=PATIENCE)).release()
            assert (await client.describe_node("/default")).path == "/default"


@pytest.mark.parametrize(
    "key", ["{P}base", pytest.param("{P}", marks=pytest.mark.exhaustive)], ids=["base", "all keys"]
)
async def test_tokens_rise_over_the_deletion_of_their_base_in_etcd(key: str) -> None:
    with a_store("etcd") as url:
        async with tenure.connect(url) as running:
            lease = await running.mutex("m").lock()
            tokens = [lease.fencing_token]
            etcd_keys(key)(Place(url, 0, 0))
            if key == "{P}base":
                await lease.release()
            else:
                await lease.wait_lost()
            async with tenure.connect(url) as later:
                for client in (later, running, later, running):
                    async with client.session() as session, session.mutex("m").lock() as lease:
                        tokens.append(lease.fencing_token)
        assert tokens == sorted(set(tokens))


@pytest.mark.exhaustive
async def test_a_base_that_was_replaced_in_etcd_ends_the_sessions() -> None:
    with a_store("etcd") as url:
        async with tenure.connect(url) as client:
            session = await client.session()
            lease = await session.mutex("m").lock()
            base = base64.b64encode(parse_etcd(url).prefix.encode() + b"base").decode()
            value = base64.b64encode(b"%d" % (lease.fencing_token + 10**6)).decode()
            etcd.shared().ask("kv/put", {"key": base, "value": value})
            async with asyncio.timeout(PATIENCE):
                assert "was replaced" in str(await lease.wait_lost())
            async with client.session() as again, again.mutex("m").lock() as later:
                assert later.fencing_token > lease.fencing_token + 10**6


SLOTS = (
    Kind("sqlite", "the request", rows("DELETE FROM requests WHERE order_id = {token}")),
    Kind("sqlite", "the session", rows("DELETE FROM sessions WHERE id = {session}")),
    Kind("redis", "the request", redis_command("HDEL", "{P}m:/default:gpu", "{token}")),
    Kind("redis", "the session", redis_command("DEL", "{P}s:{session}")),
    Kind("redis", "the waiters", redis_command("DEL", "{P}w:/default:gpu"), kept=True),
    Kind("etcd", "the session", etcd_keys("{P}s/:default/{session}")),
    Kind("etcd", "the request", etcd_keys("{P}q/:default/gpu/r/{session}")),
    Kind("postgresql", "the request", sql("DELETE FROM {S}.requests WHERE order_id = {token}")),
    Kind("postgresql", "the session", sql("DELETE FROM {S}.sessions WHERE id = {session}")),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", parameters(SLOTS))
async def test_a_slot_that_is_deleted_passes_on_and_the_other_one_is_kept(kind: Kind) -> None:
    with a_store(kind.engine) as url:
        async with (
            tenure.connect(url) as one,
            tenure.connect(url) as other,
            tenure.connect(url) as third,
            other.session(recovery_window=WINDOW) as second,
            third.session(recovery_window=WINDOW) as last,
        ):
            first = await one.session(recovery_window=WINDOW)  # its end cancels no block
            await first.semaphore("gpu").create(limit=3)
            lease = await first.semaphore("gpu").acquire(2)
            kept = await second.semaphore("gpu").acquire(1)
            waiting = asyncio.ensure_future(last.semaphore("gpu").acquire(2))
            async with asyncio.timeout(PATIENCE):
                while not (await last.semaphore("gpu").describe(waiters=True)).waiters:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                kind.delete(Place(url, first.id, lease.fencing_token))
                if kind.kept:
                    await lease.release()
                else:
                    await lease.wait_lost()
                later = await waiting
                assert not lease.held
                assert kept.held
                found = await last.semaphore("gpu").describe(owners=True, waiters=True)
                assert (found.held, len(found.owners), len(found.waiters)) == (3, 2, 0)
                await later.release()
                await kept.release()
                assert (await last.semaphore("gpu").describe()).held == 0


@contextmanager
def a_forgetful_server(scheme: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the URL of a server on a store in memory, and a call that restarts it without data."""
    with contextlib.ExitStack() as servers, a_name_in_memory() as store:
        if scheme == "tenure":
            first = servers.enter_context(served(store))

            def restart_tenure() -> None:
                first.stop()
                again = Served(store, url=first.address).start()
                servers.callback(again.stop)

            yield first.address, restart_tenure
        elif scheme == "dflockd":
            former = InThread(store).__enter__()
            servers.callback(former.__exit__)

            def restart_dflockd() -> None:
                former.__exit__()
                servers.enter_context(InThread(store, port=former.port))

            yield former.url, restart_dflockd
        else:
            server = YdbServer(store)
            server.start()
            servers.callback(server.stop)

            def restart_ydb() -> None:
                server.stop()
                server.start()

            yield server.url, restart_ydb


@pytest.mark.parametrize("scheme", ["tenure", "ydb", "dflockd"])
async def test_a_server_that_is_restarted_without_its_data_has_lost_the_lease(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    with a_forgetful_server(scheme) as (url, restart):
        async with tenure.connect(url) as one, tenure.connect(url) as other:
            holder = await one.session(recovery_window=WINDOW)
            lease = await holder.mutex("m").lock()
            waiter = await other.session(recovery_window=WINDOW)
            waiting = await waiter.semaphore("m", ephemeral=True).enqueue(EPHEMERAL_LIMIT)
            await asyncio.to_thread(restart)
            async with asyncio.timeout(WINDOW + LATE):
                assert isinstance(await lease.wait_lost(), tenure.LeaseLost)
            with pytest.raises(tenure.LeaseLost):
                await lease.release()
            async with asyncio.timeout(PATIENCE):
                with contextlib.suppress(tenure.TenureError):
                    await (await waiting.wait()).release()
            for words in (["ls"], ["describe", "m"], ["doctor"]):
                code, said = await asyncio.to_thread(run_command, url, *words)
                assert code in set(Status), said
                assert "Traceback" not in said
            async with (
                tenure.connect(url) as third,
                third.session(recovery_window=WINDOW) as session,
                session.mutex("m").lock(timeout=PATIENCE) as later,
            ):
                assert later.fencing_token > lease.fencing_token
    assert "Traceback" not in caplog.text


ADMINISTRATION: dict[str, Callable[[tenure.Client, Place], Any]] = {
    "the node is dropped": lambda client, _: client.drop_node("/n", force=True),
    "the session is ended": lambda client, place: client.end_session("/n", place.session),
    "the request is evicted": lambda client, place: client.evict("/n", "s", place.token),
    "the semaphore is deleted": lambda client, _: _delete(client),
}


async def _delete(client: tenure.Client) -> None:
    async with client.session("/n") as session:
        await session.semaphore("s").delete(force=True)


@pytest.mark.parametrize("what", ADMINISTRATION)
@pytest.mark.parametrize("scheme", ["tenure", "ydb"])
async def test_what_an_administrator_ends_in_the_store_of_a_server_is_lost_at_once(
    scheme: str, what: str
) -> None:
    with a_name_in_memory() as store, a_server(scheme, store) as url:
        async with tenure.connect(store) as administrator:
            await administrator.create_node("/n")
            async with tenure.connect(url) as one, tenure.connect(url) as other:
                holder = await one.session("/n", recovery_window=30)
                await holder.semaphore("s").create(limit=1)
                lease = await holder.semaphore("s").acquire()
                waiter = await other.session("/n", recovery_window=30)
                waiting = await waiter.semaphore("s").enqueue()
                await ADMINISTRATION[what](
                    administrator, Place(store, holder.id, lease.fencing_token)
                )
                async with asyncio.timeout(10):  # a third of the recovery window
                    assert isinstance(await lease.wait_lost(), tenure.LeaseLost)
                    with pytest.raises(tenure.LeaseLost):
                        await lease.release()
                    if what in ("the session is ended", "the request is evicted"):
                        await (await waiting.wait()).release()
                    else:
                        with pytest.raises(tenure.TenureError):
                            await waiting.wait()
                for session in (holder, waiter):
                    with contextlib.suppress(tenure.TenureError):
                        await session.aclose()
