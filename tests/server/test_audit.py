"""The audit log has every administrative action, with its identity and source."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.server.audit import Audit
from tenure.server.auth import Identity
from tests.server.certificates import Authority
from tests.server.serving import Served, serving
from tests.server.test_process import until
from tests.server.test_revocation import (
    LEAVING,
    LISTEN,
    STAYING,
    caller_of,
    lines_of,
    named,
    reload,
    target_of,
    tls_of,
    tls_options,
)
from tests.server.ydb.raw import channel, stream

BILLING = Identity("billing", "token")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """What a test can know: no time, and of the source its host."""
    known = {name: value for name, value in record.items() if name != "time"}
    if known["source"] is not None:
        known["source"] = known["source"].rpartition(":")[0]
    return known


async def act(server: Served, native: str, grpc: str) -> dict[str, int]:
    """Do everything that is recorded, in this order, with the token of `deploy`."""
    async with tenure.connect(native.replace("://", f"://{STAYING}@")) as client:
        await client.create_node("/n")
        await client.alter_node("/n", tenure.NodeConfig(self_check_period=1.0))
        with contextlib.suppress(tenure.NodeExists):
            await client.create_node("/n")
        held = await client.session("/n", recovery_window=60)
        lease = await held.mutex("m").lock()
        assert await client.evict("/n", "m", lease.fencing_token)
        doomed = await client.session("/n", recovery_window=60)
        ended = doomed.id
        assert await client.end_session("/n", ended)
        assert not await client.end_session("/n", ended)  # nothing to record
        await held.semaphore("s").create(limit=1)
        await held.semaphore("s").delete(force=True)
        await held.semaphore("t").create(limit=1)
        await held.semaphore("t").delete()
        async with channel(target_of(grpc)) as over:
            theirs = await stream(over, metadata=[("x-ydb-auth-ticket", STAYING)])
            await theirs.start("/local/n", timeout=60)
            await theirs.create("u")
            await theirs.delete("u", force=True)
            await theirs.expect("delete_semaphore_result")
        held_id = held.id
        await held.aclose()
        await client.drop_node("/n", force=True)
    return {
        "order_id": lease.fencing_token,
        "ended": ended,
        "held": held_id,
        "theirs": theirs.session_id,
    }


async def test_every_administrative_action_is_recorded_in_the_file(tmp_path: Path) -> None:
    tokens, log = tmp_path / "tokens", tmp_path / "audit.jsonl"
    tokens.touch(0o600)
    tokens.write_text(named(leaving=LEAVING, deploy=STAYING))
    options = ["--auth-token-file", str(tokens), "--audit-log", str(log)]
    listen = ["tenure://127.0.0.1:0", "ydb://127.0.0.1:0", "dflockd://127.0.0.1:0"]
    async with serving(tmp_path, *options, listen=listen) as server:
        native, grpc, line = server.addresses
        ids = await act(server, native, grpc)
        with pytest.raises(tenure.AuthenticationFailed):
            async with tenure.connect(native) as stranger:
                await stranger.list_nodes()
        async with lines_of(line, "") as lines:
            assert await lines.ask("auth", "_", "wrong") == "error_auth"
        async with channel(target_of(grpc)) as over:
            refused = await stream(over)
            await refused.receive()
        async with caller_of(native, LEAVING):
            tokens.write_text(named(deploy=STAYING, added="f" * 40))
            await reload(server)
        assert await server.end() == 0
    deploy = {"identity": "deploy", "kind": "token", "source": "127.0.0.1"}
    own = {"identity": None, "kind": None, "source": None, "by": "reload"}
    stranger_facts = {"identity": None, "kind": None, "source": "127.0.0.1"}
    found = [facts(each) for each in records(log)]
    failed = found.pop(2)
    assert (failed["event"], failed["outcome"]) == ("node created", "failed")
    assert "already" in failed["why"] or "exists" in failed["why"]
    forced = "semaphore deleted by force"
    logins = [each for each in found if each["event"] == "login refused"]
    assert [each for each in found if each["event"] != "login refused"] == [
        {"event": "node created", **deploy, "node": "/n", "outcome": "done"},
        {"event": "node altered", **deploy, "node": "/n", "outcome": "done"},
        {
            "event": "request evicted",
            **deploy,
            "node": "/n",
            "name": "m",
            "order_id": ids["order_id"],
            "outcome": "done",
        },
        {
            "event": "session ended",
            **deploy,
            "node": "/n",
            "session": ids["ended"],
            "outcome": "done",
        },
        {
            "event": forced,
            **deploy,
            "node": "/n",
            "name": "s",
            "session": ids["held"],
            "outcome": "done",
        },
        {
            "event": forced,
            **deploy,
            "node": "/n",
            "name": "u",
            "session": ids["theirs"],
            "outcome": "done",
        },
        {"event": "node dropped", **deploy, "node": "/n", "force": True, "outcome": "done"},
        {"event": "token revoked", **own, "token": "leaving"},
        {"event": "token added", **own, "token": "added"},
        {
            "event": "connection ended",
            "identity": "leaving",
            "kind": "token",
            "source": "127.0.0.1",
            "why": "the token leaving was revoked",
        },
    ]
    assert {each.pop("listener") for each in logins} == {"tenure", "dflockd", "ydb"}
    assert all(each.pop("why") for each in logins)
    assert all(each == {"event": "login refused", **stranger_facts} for each in logins)
    content = log.read_text()
    assert stat.S_IMODE(os.stat(log).st_mode) == 0o600
    assert STAYING not in content
    assert "wrong" not in content


async def test_without_a_file_the_log_has_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        async with tenure.connect(server.address) as client:
            for number in range(30):  # an event that is seldom logged so often
                await client.create_node(f"/n{number}")
        assert await server.end() == 0
        told = server.told("audit")
        assert [each["node"] for each in told] == [f"/n{number}" for number in range(30)]
        assert {(each["action"], each["identity"], each["level"]) for each in told} == {
            ("node created", "anonymous", "info")
        }


async def test_a_reload_goes_on_in_a_new_file(tmp_path: Path) -> None:
    log, rotated = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    async with serving(tmp_path, "--audit-log", str(log)) as server:
        async with tenure.connect(server.address) as client:
            await client.create_node("/a")
            log.rename(rotated)
            await client.create_node("/b")
            await until(lambda: len(records(rotated)) == 2)
            await reload(server)
            await client.create_node("/c")
        assert await server.end() == 0
    assert [each["node"] for each in records(rotated)] == ["/a", "/b"]
    assert [each["node"] for each in records(log)] == ["/c"]


async def test_a_client_certificate_that_is_refused_is_recorded(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    own, stranger = authority.signs("server.test"), other.signs("stranger")
    log = tmp_path / "audit.jsonl"
    options = [*tls_options(authority, own, authority.cert), "--audit-log", str(log)]
    async with serving(tmp_path, *options, listen=LISTEN[:1]) as server:
        with contextlib.suppress(AssertionError, OSError):
            async with caller_of(server.address, ssl=tls_of(authority, stranger)):
                pass
        await server.until("handshake failed")
        assert await server.end() == 0
    (record,) = records(log)
    assert record["event"] == "login refused"
    assert "certificate" in record["why"].lower()


def test_an_audit_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(tenure.InvalidArgument, match="cannot be opened: No such file"):
        Audit(logging.getLogger("tests"), str(tmp_path / "missing" / "audit"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(tenure.InvalidArgument, match="cannot be opened: "):
        Audit(logging.getLogger("tests"), str(tmp_path / "pipe"))


def test_a_reader_that_is_stuck_stops_no_action_and_drops_are_counted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    audit = Audit(logging.getLogger("tests"), str(pipe))
    for number in range(30_000):
        audit.record("node created", BILLING, "10.0.0.1:5", node=f"/{number}")
    assert audit.dropped > 0
    os.set_blocking(reader, True)
    whole = dropped = 0
    with open(reader, "rb") as lines:
        while whole + dropped < 30_000:
            told = json.loads(lines.readline())
            if told["event"] == "records were dropped":
                dropped += told["count"]
            else:
                whole += 1
        audit.close()
    assert dropped == audit.dropped


def test_an_action_that_is_cut_off_has_an_unknown_outcome(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(logging.getLogger("tests"), str(path))
    for error in (KeyboardInterrupt(), tenure.NodeNotFound("no node /n")):
        with (
            contextlib.suppress(KeyboardInterrupt, tenure.NodeNotFound),
            audit.action("node dropped", BILLING, "here", node="/n" * 2000),
        ):
            raise error
    audit.close()
    audit.close()
    unknown, failed = records(path)
    assert unknown["outcome"] == "unknown"
    assert (failed["outcome"], failed["why"]) == ("failed", "no node /n")
    assert len(failed["node"]) < 1100


def test_actions_that_fail_are_counted_when_they_are_many(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(logging.getLogger("tests"), str(path))
    for port in range(100):
        with (
            contextlib.suppress(tenure.NodeNotFound),
            audit.action("node dropped", BILLING, f"10.0.0.1:{port}", node="/n"),
        ):
            if port != 99:
                raise tenure.NodeNotFound("no node /n")
    audit.close()
    *told, done, last = records(path)
    assert [each["outcome"] for each in told] == ["failed"] * 20
    assert done["outcome"] == "done"
    assert (last["event"], last["identity"]) == ("more actions failed", "billing")
    assert last["count"] == 79


def test_many_sources_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(logging.getLogger("tests"), str(path))
    for number in range(1500):
        audit.refused_login(f"10.0.{number // 256}.{number % 256}:1", "wrong token")
    audit.close()
    *_, last = records(path)
    assert (last["source"], last["count"]) == ("other sources", 480)


def test_refused_logins_are_counted_when_they_are_many(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(logging.getLogger("tests"), str(path))
    for port in range(100):
        audit.refused_login(f"10.0.0.1:{port}", "wrong token")
    audit.refused_login("[::1]:7", "wrong token")
    audit.close()
    *told, last = records(path)
    assert len(told) == 21
    assert told[-1]["source"] == "[::1]:7"
    assert (last["event"], last["source"], last["count"]) == ("more logins refused", "10.0.0.1", 80)
