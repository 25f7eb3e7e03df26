"""The console on a server: its tokens, certificates, permissions and audit log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from typing import Any
from urllib.parse import quote, urlencode

import pytest

import tenure
from tenure.server.auth import Credentials
from tenure.server.limits import Limits
from tests.server.http.asking import (
    HOLDER,
    READER,
    Answered,
    Caller,
    ask,
    called,
    hosted,
    two_ticks,
)
from tests.server.http.test_answers import tokens


async def signed_in(caller: Caller, token: str) -> str:
    """Sign in; the cookie."""
    answered = await submit(caller, "/sign-in", token=token)
    assert answered.status == 303
    return answered.headers["set-cookie"].partition(";")[0]


async def submit(caller: Caller, path: str, cookie: str = "", **fields: str) -> Answered:
    more = {"cookie": cookie} if cookie else {}
    return await caller.ask(
        path,
        method="POST",
        body=urlencode(fields).encode(),
        content_type="application/x-www-form-urlencoded",
        sec_fetch_site="same-origin",
        **more,
    )


def api(path: str, **query: str | int) -> str:
    return f"/api/v1/{path}?" + urlencode(query)


async def test_a_browser_signs_in_with_a_token_and_keeps_its_connection() -> None:
    async with hosted(authenticator=tokens()) as server:
        assert (await ask(server.address, "/")).headers["location"].endswith("/sign-in")
        async with called(server.address) as browser:
            cookie = await signed_in(browser, READER)
            for _ in range(2):
                page = await browser.ask("/", cookie=cookie)
                assert page.status == 200
                assert page.lasts
        async with called(server.address) as browser:  # another connection of the same browser
            assert (await browser.ask("/", cookie=cookie)).lasts
            (connection,) = server.http.connections
            assert connection.identity.name == "reader"
            assert server.context.counts.connections.taken == 1


async def test_a_wrong_token_is_refused_late_recorded_and_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tenure.server")
    async with hosted(authenticator=tokens()) as server:
        for path in ("/sign-in", "/api/v1/nodes"):
            async with called(server.address) as client:
                began = time.monotonic()
                if path == "/sign-in":
                    refused = await submit(client, path, token="f" * 32)
                else:
                    refused = await client.ask(path, token="f" * 32)
                assert refused.status in {401, 403}
                assert time.monotonic() - began >= 0.1
                assert not refused.lasts
        facts = [vars(each).get("facts", {}) for each in caplog.records]
        assert [each.get("action") for each in facts].count("login refused") == 2
        assert "f" * 32 not in caplog.text


async def test_a_server_without_tokens_lets_everyone_look() -> None:
    async with hosted() as server:
        assert (await ask(server.address, "/")).status == 200
        nodes = await ask(server.address, api("nodes"))
        assert [each["path"] for each in nodes.json["nodes"]] == ["/default"]


async def test_an_identity_sees_its_nodes_alone() -> None:
    async with hosted(authenticator=tokens()) as server:
        for path in ("/billing", "/secret"):
            await server.context.engine.create_node(path, tenure.NodeConfig(), exist_ok=True)
        mine = await ask(server.address, api("nodes"), token=HOLDER)
        assert [each["path"] for each in mine.json["nodes"]] == ["/billing"]
        hidden = await ask(server.address, api("semaphores", node="/secret"), token=HOLDER)
        assert hidden.status == 404
        everything = await ask(server.address, api("nodes"), token=READER)
        assert len(everything.json["nodes"]) == 3


async def test_an_administrator_ends_sessions_and_a_reader_may_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tenure.server")
    authenticator = tokens(holder={"/": "administer"})
    url_token = f"://{HOLDER}@"
    async with hosted(authenticator=authenticator) as server:
        url = server.native.address.replace("://", url_token)
        async with tenure.connect(url) as client:
            session = await client.session("/default")
            lease = await session.mutex("m").lock()
            body = json.dumps({"node": "/default", "session_id": session.id}).encode()

            async def end(token: str) -> Answered:
                return await ask(
                    server.address,
                    "/api/v1/sessions/end",
                    method="POST",
                    token=token,
                    body=body,
                    content_type="application/json",
                )

            assert (await end(READER)).status == 403
            lease.check()
            ended = await end(HOLDER)
            assert (ended.status, ended.json["ended"]) == (200, True)
            async with asyncio.timeout(60):
                await lease.wait_lost()
            await session.aclose()
    facts: list[dict[str, Any]] = [vars(each).get("facts", {}) for each in caplog.records]
    (record,) = [each for each in facts if each.get("action") == "session ended"]
    assert (record["identity"], record["outcome"]) == ("holder", "done")
    assert record["source"].startswith("127.0.0.1:")


async def test_a_token_that_is_revoked_ends_its_sign_in_and_its_connections() -> None:
    authenticator = tokens()
    async with hosted(authenticator=authenticator) as server, called(server.address) as browser:
        cookie = await signed_in(browser, READER)
        assert (await browser.ask("/", cookie=cookie)).lasts
        authenticator.replace(Credentials(tuple(tokens(reader={"/": "read"})._listed.tokens[1:])))
        assert await server.http.end_connections(authenticator.verdict) == 1
        assert await browser.rest() == b""
        again = await ask(server.address, "/", cookie=cookie)
        assert again.headers["location"].endswith("/sign-in")
        assert (await ask(server.address, api("nodes"), token=READER)).status == 401


async def test_changed_permissions_end_a_sign_in() -> None:
    authenticator = tokens()
    async with hosted(authenticator=authenticator) as server:
        async with called(server.address) as browser:
            cookie = await signed_in(browser, READER)
        authenticator.replace(tokens(reader={"/billing": "read"})._listed)
        assert (await ask(server.address, "/", cookie=cookie)).status == 303


async def test_a_client_is_shown_with_its_own_process_and_never_the_server_s() -> None:
    async with hosted() as server:
        url = server.native.address
        async with (
            tenure.connect(url, identify=False) as nameless,
            tenure.connect(url) as known,
            nameless.session("/default") as unknown,
            known.session("/default"),
            unknown.mutex("m").lock(),
        ):
            found = (await ask(server.address, api("sessions", node="/default"))).json["sessions"]
            pids = {each["id"]: each.get("pid") for each in found}
            assert pids.pop(unknown.id) is None
            assert list(pids.values()) == [os.getpid()]  # of the client, which is here too
            path = api("requests", node="/default", name="m", role="owners")
            owners = (await ask(server.address, path)).json
            assert os.getpid() not in {each.get("pid") for each in owners["requests"]}


async def test_a_host_name_must_be_known() -> None:
    async with hosted() as server:
        for host in ("evil.test", "evil.test:7080", "127.0.0.1.evil.test"):
            assert (await ask(server.address, "/", host=host)).status == 421
        for host in ("127.0.0.1", "localhost:7080", "[::1]:7080"):
            assert (await ask(server.address, "/", host=host)).status == 200


async def test_a_page_that_lives_outlives_a_greeting_and_ends_with_its_token() -> None:
    authenticator = tokens()
    limits = Limits(greeting_time=0.5, message_time=0.5)
    async with (
        hosted(authenticator=authenticator, limits=limits) as server,
        called(server.address) as browser,
    ):
        async with called(server.address) as other:
            cookie = await signed_in(other, READER)
        browser.say(f"GET /live HTTP/1.1\r\nhost: localhost\r\ncookie: {cookie}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            assert (await browser.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await two_ticks(server)
        (connection,) = server.http.connections
        assert connection.identity.name == "reader"
        authenticator.replace(Credentials(tokens()._listed.tokens[1:]))
        assert await server.http.end_connections(authenticator.verdict) == 1
        await browser.rest()


async def test_a_page_that_lives_does_not_delay_the_end() -> None:
    async with hosted() as server, called(server.address) as browser:
        browser.say(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(60):
            head = await browser.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await server.http.aclose()
        await browser.rest()


async def test_names_from_outside_are_escaped() -> None:
    name = '<script>alert("1")</script>'
    paths = "/semaphores?node=/default", f"/semaphore?node=/default&name={quote(name)}"
    async with (
        hosted() as server,
        tenure.connect(server.native.address) as client,
        client.mutex(name).lock(),
    ):
        for path in paths:
            page = await ask(server.address, path)
            assert page.status == 200
            assert b"<script>alert" not in page.body
