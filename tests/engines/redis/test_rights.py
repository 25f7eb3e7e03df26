"""The account of the Redis page: it suffices, and an error names what is missing of it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest

import tenure
from tests.engines.redis.helpers import PATIENCE, is_waited_for
from tests.engines.redis.servers import Server, a_server
from tests.test_documents import ROOT

PAGE = (ROOT / "docs" / "engines" / "redis.md").read_text(encoding="utf-8")


def denied(server: Server) -> set[str]:
    """The commands that accounts tried to use and may not."""
    log = server.tell("ACL", "LOG")
    assert isinstance(log, list)
    entries = [{str(key, "ascii"): value for key, value in each.items()} for each in log]
    return {str(each["object"], "utf-8") for each in entries}


def account() -> list[str]:
    """The words of the page's command that follow the name of the account."""
    found = re.search(r"ACL SETUSER app (.*?)\n```", PAGE, re.DOTALL)
    assert found is not None
    return found[1].split()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with a_server() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.tell("FLUSHALL")
    shared_server.tell("SCRIPT", "FLUSH")
    shared_server.tell("CONFIG", "RESETSTAT")
    shared_server.tell("ACL", "SETUSER", "app", "reset", *account())
    return shared_server


def url_of(server: Server, parameters: str = "") -> str:
    return f"redis+unix://app:password@{server.socket}?fresh=true{parameters}"


@pytest.mark.parametrize("protocol", [2, 3])
async def test_the_account_of_the_page_may_do_everything_and_nothing_else(
    server: Server, protocol: int
) -> None:
    url = url_of(server, f"&protocol={protocol}")
    server.tell("ACL", "LOG", "RESET")
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(resumable=True) as session,
    ):
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(client, "m")
        await lease.release()
        await (await waiting).release()
        await client.create_node("/jobs")
        pool = session.semaphore("pool")
        await pool.create(limit=2, data=b"old")
        async with pool.watch(data=True) as states:
            assert (await anext(states)).data == b"old"
            await pool.update(b"new")
            async with asyncio.timeout(PATIENCE):
                assert (await anext(states)).data == b"new"
        await pool.delete()
        await client.drop_node("/jobs")
    assert denied(server) <= {"config|get"}  # optional, see the page
    for words in (("FLUSHALL",), ("KEYS", "*"), ("SCRIPT", "FLUSH"), ("SET", "key", "value")):
        refusal = str(server.tell("ACL", "DRYRUN", "app", *words))
        assert "no permissions" in refusal


async def test_the_account_of_the_page_may_confirm_grants_by_replicas(server: Server) -> None:
    url = url_of(server, "&min_replicas=1")
    server.tell("ACL", "LOG", "RESET")
    async with tenure.connect(url) as client:
        with pytest.raises(tenure.EngineError, match="0 of min_replicas=1 replicas confirmed"):
            await client.mutex("m").lock()
    assert denied(server) <= {"config|get"}  # optional, see the page


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("-evalsha", r"Grant its account \+evalsha"),
        ("-role", r"Grant its account \+role"),
        ("-script|load", r"Grant its account \+script\|load"),
        ("-subscribe", r"Grant its account \+subscribe"),
        ("-time", r"Grant its account .*\+time"),
        ("-hset", r"Grant its account .*\+(@write|hset)"),
        ("resetkeys", r"Grant its account ~\{tenure\}:\*"),
        ("resetchannels", r"Grant its account &\{tenure\}:\*"),
    ],
)
async def test_a_missing_right_is_named_when_connecting(
    server: Server, missing: str, named: str
) -> None:
    server.tell("ACL", "SETUSER", "app", missing)
    with pytest.raises(tenure.AuthenticationFailed, match=named) as refused:
        async with tenure.connect(url_of(server)) as client:
            await client.list_nodes()
    assert "docs/engines/redis.md" in str(refused.value)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("-evalsha", r"Grant its account \+evalsha"),
        ("-time", r"Grant its account .*\+time"),
        ("resetkeys", r"Grant its account ~\{tenure\}:\*"),
    ],
)
async def test_a_right_that_is_revoked_later_is_named_by_each_call(
    server: Server, missing: str, named: str
) -> None:
    async with tenure.connect(url_of(server)) as client, client.session() as session:
        calls = (
            lambda: session.mutex("m").lock(),
            lambda: session.semaphore("s").create(1),
            lambda: client.create_node("/jobs"),
            client.session,
        )
        server.tell("ACL", "SETUSER", "app", missing)
        for call in calls:
            with pytest.raises(tenure.EngineError, match=named) as refused:
                await call()
            assert "docs/engines/redis.md" in str(refused.value)
        server.tell("ACL", "SETUSER", "app", *account())


@pytest.mark.parametrize("how", ["denied", "renamed"])
async def test_without_info_it_works_with_a_warning(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    rename = ("--rename-command", "INFO", "hidden") if how == "renamed" else ()
    with a_server(*rename) as server:
        server.tell("ACL", "SETUSER", "app", *account())
        if how == "denied":
            server.tell("ACL", "SETUSER", "app", "-info")
        async with tenure.connect(url_of(server)) as client, client.mutex("m").lock() as lease:
            assert lease.held
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("INFO is denied to this account or unknown")


@pytest.mark.parametrize("command", ["EVALSHA", "SCRIPT", "ROLE", "SUBSCRIBE"])
async def test_a_command_that_the_server_does_not_know_is_named(command: str) -> None:
    with (
        a_server("--rename-command", command, "hidden") as server,
        pytest.raises(tenure.Unsupported, match=f"Restore the command {command}") as refused,
    ):
        await tenure.connect(server.url).list_nodes()
    assert "docs/engines/redis.md" in str(refused.value)


@pytest.mark.parametrize("command", ["HELLO", "CLIENT", "INFO", "MEMORY"])
async def test_commands_that_are_not_needed_may_be_missing(command: str) -> None:
    with a_server("--rename-command", command, "hidden") as server:
        async with tenure.connect(server.url) as client, client.mutex("m").lock() as lease:
            assert lease.held
