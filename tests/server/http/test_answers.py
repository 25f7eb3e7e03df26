"""What the HTTP listener answers, and to whom."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import pytest

from tenure.background import Failures
from tenure.engines.memory import MemoryEngine
from tenure.server.auth import Authenticator, Credentials, Token
from tenure.server.auth.identity import Permissions
from tenure.server.auth.tokens import Rights
from tenure.server.http.health import BOUND, StoreProbe
from tenure.server.http.options import HttpOptions
from tenure.testing import VirtualClock
from tests.server.http.asking import HOLDER, READER, ask, called, hosted


def tokens(**permissions: dict[str, object]) -> Authenticator:
    """Tokens of a reader of everything, and of one who may only use /billing."""
    authenticator = Authenticator()
    rights: dict[str, dict[str, object]] = {
        "reader": {"/": "read"},
        "holder": {"/billing": "hold"},
        **permissions,
    }
    known = [
        replace(Token.plain(text, name), rights=Rights(Permissions.parse(rights[name])))
        for name, text in {"reader": READER, "holder": HOLDER}.items()
    ]
    authenticator.replace(Credentials(tuple(known)))
    return authenticator


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
@pytest.mark.parametrize("required", [True, False])
async def test_a_health_check_needs_no_token(path: str, *, required: bool) -> None:
    async with hosted(authenticator=tokens() if required else None) as server:
        answered = await ask(server.address, path)
        assert answered.status == 200
        assert answered.headers["content-type"] == "application/json"
        assert answered.headers["cache-control"] == "no-store"
        assert "date" in answered.headers
        assert answered.json.get("alive" if path == "/healthz" else "ready") is True


async def test_everyone_may_read_the_metrics_of_a_server_without_tokens() -> None:
    async with hosted() as server:
        answered = await ask(server.address, "/metrics")
        assert answered.status == 200
        assert answered.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answered.value("tenure_store_up") == 1


async def test_metrics_need_a_token_that_may_read_everything() -> None:
    async with hosted(authenticator=tokens()) as server:
        assert (await ask(server.address, "/metrics", token=READER)).status == 200
        without = await ask(server.address, "/metrics")
        assert without.status == 401
        assert without.headers["www-authenticate"] == "Bearer"
        another = await ask(server.address, "/metrics", token=HOLDER)
        assert another.status == 403
        assert b"the permission read on /, which holder has not" in another.body
        assert b"tenure_" not in another.body


async def test_open_metrics_need_no_token() -> None:
    options = HttpOptions(open_metrics=True)
    async with hosted(authenticator=tokens(), options=options) as server:
        assert (await ask(server.address, "/metrics")).status == 200
        assert (await ask(server.address, "/metrics", token="wrong")).status == 200


async def test_a_wrong_token_is_answered_late_recorded_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tenure.server")
    async with hosted(authenticator=tokens()) as server:
        began = time.monotonic()
        refused = await ask(server.address, "/metrics", token="f" * 32)
        assert time.monotonic() - began >= 0.1
        assert refused.status == 401
        assert not refused.lasts
        facts = [vars(each).get("facts", {}) for each in caplog.records]
        (record,) = [each for each in facts if each.get("action") == "login refused"]
        assert record["listener"] == "http"
        assert "f" * 32 not in caplog.text
        assert server.context.meter.refusals["login"] == 1


async def test_a_stranger_gets_one_response_and_a_client_with_a_token_many() -> None:
    async with hosted(authenticator=tokens()) as server:
        async with called(server.address) as stranger:
            assert not (await stranger.ask()).lasts
            assert await stranger.rest() == b""
        async with called(server.address) as client:
            for _ in range(3):
                assert (await client.ask("/metrics", token=READER)).lasts
            assert server.context.counts.connections.taken == 1


async def test_a_client_of_a_server_without_tokens_keeps_its_connection() -> None:
    async with hosted() as server, called(server.address) as client:
        for path in ("/healthz", "/readyz", "/metrics", "/healthz"):
            assert (await client.ask(path)).lasts


async def test_requests_that_follow_one_another_are_answered_in_order() -> None:
    async with hosted() as server, called(server.address) as client:
        request = "GET {} HTTP/1.1\r\nhost: localhost\r\n\r\n"
        paths = ["/healthz", "/nothing", "/readyz"] * 5
        client.say("".join(map(request.format, paths)).encode())
        statuses = [(await client.hear()).status for _ in paths]
        assert statuses == [200, 404, 200] * 5


async def test_what_there_is_not_is_not_found() -> None:
    async with hosted() as server:
        assert (await ask(server.address, "/nothing")).status == 404
        assert (await ask(server.address, "/metrics/")).status == 404
        assert (await ask(server.address, "http://other.test/metrics")).status == 404
        assert (await ask(server.address, "/metrics", method="DELETE")).status == 405
        assert (await ask(server.address, "/metrics", method="HEAD")).body == b""


@pytest.mark.parametrize(
    "host", ["evil.test", "a/../metrics?x=", "localhost\tx", "[::1", "x" * 3000]
)
async def test_a_host_header_changes_no_answer_and_is_not_repeated(host: str) -> None:
    async with hosted(authenticator=tokens()) as server:
        for path in ("/metrics", "/metrics/", "//metrics", "/nothing"):
            answered = await ask(server.address, path, host=host)
            assert answered.status in {400, 401, 404, 421}
            assert not any(host in value for value in answered.headers.values())
            assert host.encode() not in answered.body


async def test_an_address_that_a_proxy_reports_does_not_count() -> None:
    async with hosted() as server, called(server.address) as client:
        await client.ask(x_forwarded_for="10.0.0.7")
        (connection,) = server.http.connections
        assert connection.peer.startswith("127.0.0.1:")
        assert connection.client is not None
        assert connection.client[0] == "127.0.0.1"


async def test_while_it_drains_it_is_not_ready_and_nobody_comes_in() -> None:
    async with hosted() as server, called(server.address) as client:
        assert (await client.ask("/readyz")).status == 200
        await server.http.drain()
        answered = await client.ask("/readyz")
        assert answered.status == 503
        assert answered.json["reason"] == "draining"
        assert (await client.ask("/healthz")).status == 200
        with pytest.raises(ConnectionError):
            await ask(server.address)
        await server.http.aclose()
        assert await client.rest() == b""


async def test_a_loop_that_was_stuck_is_shown() -> None:
    async with hosted() as server:
        await asyncio.sleep(0.25)  # until it is observed
        time.sleep(0.5)  # noqa: ASYNC251  on purpose
        answered = await ask(server.address, "/healthz")
        assert answered.json["loop_lag_max_seconds"] >= 0.3
        metrics = await server.scrape(lambda it: it.value("tenure_loop_lag_max_seconds") >= 0.3)
        late = metrics.value("tenure_loop_lag_seconds_count") - metrics.value(
            "tenure_loop_lag_seconds_bucket", le="0.25"
        )
        assert late >= 1


@pytest.mark.usefixtures("loop_factory")
async def test_a_thousand_checks_make_one_reading_of_the_store(clock: VirtualClock) -> None:
    readings = 0

    class Counted(MemoryEngine):
        async def describe_node(self, path: str):  # type: ignore[no-untyped-def]
            nonlocal readings
            readings += 1
            await asyncio.sleep(0.1)
            return await super().describe_node(path)

    engine = Counted("", clock)
    await engine.open()
    probe = StoreProbe(engine, Failures("reading", logging.getLogger("tenure.server")))
    assert set(await asyncio.gather(*(probe.read() for _ in range(1000)))) == {None}
    assert readings == 1
    await probe.read()
    assert readings == 1
    await asyncio.sleep(1.1)
    await probe.read()
    assert readings == 2
    assert probe.latencies.sum == pytest.approx(0.2)
    await probe.aclose()
    await engine.aclose()


@pytest.mark.usefixtures("loop_factory")
async def test_a_check_that_is_cancelled_does_not_cancel_the_others(clock: VirtualClock) -> None:
    class Silent(MemoryEngine):
        async def describe_node(self, path: str):  # type: ignore[no-untyped-def]
            await asyncio.Event().wait()

    engine = Silent("", clock)
    await engine.open()
    probe = StoreProbe(engine, Failures("reading", logging.getLogger("tenure.server")))
    one, other = (asyncio.create_task(probe.read()) for _ in range(2))
    await asyncio.sleep(BOUND / 2)
    one.cancel()
    assert await other == f"no answer within {BOUND:g} s"
    assert probe.failed == 1
    await probe.aclose()
    await engine.aclose()
