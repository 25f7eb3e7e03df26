"""Who may come in, what is too much, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.etcd import connect
from tenure.model import DEFAULT_NODE
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import a_cluster, a_prefix, free_port, version
from tests.server.certificates import Authority

MIB = 1024 * 1024


async def _locks(url: str) -> int:
    """What the token is of a lock that is taken and given back there."""
    async with tenure.connect(url) as client, client.mutex("m").lock(timeout=30) as lease:
        assert lease.fencing_token is not None
        return lease.fencing_token


async def test_a_user_is_let_in_with_the_password_and_nobody_else() -> None:
    with a_cluster() as cluster:
        cluster.have_users(root="secret", anna="word")
        host = cluster.members[0].address
        assert await _locks(f"etcd://anna:word@{host}")
        for url in (f"etcd://anna:guess@{host}", f"etcd://{host}"):
            with pytest.raises(tenure.AuthenticationFailed, match=host):
                await _locks(url)


async def test_a_user_is_named_to_a_cluster_that_has_users_only_later() -> None:
    with a_cluster() as cluster:
        url = f"etcd://anna:word@{cluster.members[0].address}"
        async with tenure.connect(url) as client:
            async with client.mutex("m").lock(timeout=30) as before:
                assert before.held
            cluster.have_users(root="secret", anna="word")
            async with client.mutex("m").lock(timeout=30) as after:
                assert after.held


async def test_a_token_that_has_expired_is_fetched_again() -> None:
    with a_cluster(1, "--auth-token-ttl", "1") as cluster:
        cluster.have_users(root="secret", anna="word")
        host = cluster.members[0].address
        async with (
            tenure.connect(f"etcd://anna:word@{host}") as client,
            client.mutex("m").lock(),
        ):
            await asyncio.sleep(2.5)  # longer than a token lives that is not used
            async with client.mutex("another").lock(timeout=10) as lease:
                assert lease.held


async def test_a_certificate_opens_a_member_that_asks_for_one(tmp_path: Path) -> None:
    with a_cluster(tls=True) as cluster:
        [member] = cluster.members
        assert member.secrets is not None
        pair, authority = member.secrets
        files = (
            f"root_certificates={authority}&certificate_chain={pair.cert}&private_key={pair.key}"
        )
        assert await _locks(f"{cluster.url}?{files}")
        assert await _locks(f"{cluster.url}?{files}&server_name=localhost")
        stranger = Authority(tmp_path, "stranger")
        for parameters in (
            f"root_certificates={stranger.cert}",
            f"root_certificates={authority}",
            f"{files}&server_name=somebody.else",
        ):
            with pytest.raises(tenure.EngineUnavailable, match="tls_ca=FILE"):
                await _locks(f"{cluster.url}?{parameters}&connect_timeout=1")


async def test_a_file_that_cannot_be_read_is_named() -> None:
    engine = connect("etcds://localhost?root_certificates=/does/not/exist", SystemClock())
    with pytest.raises(tenure.InvalidArgument, match="/does/not/exist"):
        await engine.open()


async def test_nobody_there_is_told_in_time() -> None:
    port = free_port()
    with pytest.raises(tenure.EngineUnavailable, match=str(port)):
        await _locks(f"etcd://127.0.0.1:{port}?connect_timeout=0.5")


async def test_a_member_that_takes_only_small_requests_refuses_large_data() -> None:
    with a_cluster(1, "--max-request-bytes", "65536") as cluster:
        async with tenure.connect(cluster.url) as client:
            with pytest.raises(tenure.InvalidArgument, match="max-request-bytes"):
                await client.mutex("m").lock(data=bytes(MIB))
            async with client.mutex("m").lock(data=b"less", timeout=10) as lease:
                assert lease.held


async def test_a_member_without_space_grants_nothing_and_takes_releases() -> None:
    if version() < (3, 4, 20) or (3, 5) <= version() < (3, 5, 7):
        pytest.skip("this etcd refuses releases too: its issue 13435")
    with a_cluster(1, "--quota-backend-bytes", str(4 * MIB)) as cluster:
        async with tenure.connect(cluster.url) as client, client.session() as session:
            pool = session.semaphore("pool")
            await pool.create(limit=1)
            async with client.mutex("m").lock():
                with pytest.raises(tenure.EngineError, match="alarm disarm"):
                    await _fill(pool)
                with pytest.raises(tenure.EngineError, match="alarm disarm"):
                    await client.mutex("another").lock(timeout=10)
            assert await client.mutex("m").inspect() is None


async def _fill(pool: tenure.Semaphore) -> None:
    # A member compares its size with the quota as of its last commit, up to 100 ms ago.
    for number in range(256):
        await pool.update(bytes([number]) * MIB)


@contextmanager
def anna_and_root() -> Iterator[tuple[str, str, Callable[[bool], object]]]:
    """The URLs of two users of a cluster, and what lets the first one in, or not any more."""
    with a_cluster() as cluster:
        cluster.have_users(root="secret", anna="word")
        host, token = cluster.members[0].address, cluster.token("root", "secret")

        def may(enter: bool) -> None:
            what, user = ("grant", "user") if enter else ("revoke", "name")
            cluster.ask(f"auth/user/{what}", {user: "anna", "role": "root"}, token=token)

        yield f"etcd://anna:word@{host}", f"etcd://root:secret@{host}", may


async def test_what_was_refused_to_leave_leaves_when_it_may() -> None:
    with anna_and_root() as (anna, root, may):
        async with (
            tenure.connect(anna) as client,
            tenure.connect(root) as other,
            other.mutex("waited for").lock(timeout=30),
        ):
            lease = await client.mutex("m").lock(timeout=30)
            late = asyncio.ensure_future(client.mutex("waited for").lock(timeout=1))
            cancelled = asyncio.ensure_future(client.mutex("waited for").lock())
            await _waiters(other, "waited for", 2)
            may(False)
            cancelled.cancel()
            with pytest.raises(tenure.AuthenticationFailed, match="read and write"):
                await lease.release()
            with pytest.raises(tenure.AcquireTimeout):
                await late
            may(True)
            async with other.mutex("m").lock(timeout=30):
                await _waiters(other, "waited for", 0)
            assert cancelled.cancelled()


async def test_what_was_refused_to_leave_ends_with_its_session() -> None:
    with anna_and_root() as (anna, root, may):
        async with tenure.connect(root) as other, tenure.connect(anna) as client:
            session = await client.session()
            lease = await session.mutex("m").lock(timeout=30)
            may(False)
            with pytest.raises(tenure.AuthenticationFailed):
                await lease.release()
            may(True)
            await session.aclose()
            async with other.mutex("m").lock(timeout=30):
                pass


async def _waiters(client: tenure.Client, name: str, number: int) -> None:
    """Return when so many wait."""
    async with asyncio.timeout(30), client.session() as session:
        while (await session.semaphore(name).describe()).waiting != number:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_who_is_shown_what_a_session_is_called_may_list_and_end_it() -> None:
    with a_prefix() as url:
        engine = connect(url, SystemClock())
        await engine.open()
        heard = Recorder()
        session = await engine.attach(Attach(DEFAULT_NODE, 30.0, "a program"), heard)
        [listed] = await engine.list_sessions(DEFAULT_NODE)
        assert (listed.id, listed.description, listed.attached) == (session.id, "a program", True)
        assert listed.silent_for is not None
        assert listed.silent_for < 10
        assert await engine.end_session(DEFAULT_NODE, session.id)
        await heard.wait_for(lambda each: each.end is not None, "the end")
        await engine.aclose()


async def test_a_member_that_is_restarted_costs_no_lease() -> None:
    with a_cluster() as cluster:
        [member] = cluster.members
        async with (
            tenure.connect(cluster.url) as client,
            client.mutex("m").lock() as lease,
        ):
            await asyncio.to_thread(member.kill)
            await asyncio.to_thread(cluster.start)
            async with client.mutex("another").lock(timeout=30):
                assert lease.held
