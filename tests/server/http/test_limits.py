"""What one HTTP client can cost the others: little, for any input."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.http.connection import BODY_BYTES, HEAD_BYTES
from tenure.server.http.options import HttpOptions
from tenure.server.http.service import HttpService, Receive, Scope, Send
from tenure.server.limits import Limits
from tests.server.http.asking import READER, Hosted, ask, called, hosted, two_ticks
from tests.server.http.test_answers import tokens


def refused(server: Hosted, limit: str) -> int:
    return server.context.meter.refusals[limit]


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not so():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)


@asynccontextmanager
async def answering(
    app: Callable[[Scope, Receive, Send], Any], **more: Any
) -> AsyncIterator[Hosted]:
    """A server whose pages are another application's."""
    async with hosted(**more) as server:
        server.http.service._app = app
        yield server


async def echo(_: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message["body"])
        more = message["more_body"]
    body = str(size).encode()
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    "beginning", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", b"GET / HTTP/1.1\r\nslow: "]
)
async def test_a_client_that_does_not_ask_is_cut_off_and_others_are_served(
    beginning: bytes,
) -> None:
    async with (
        hosted(limits=Limits(greeting_time=0.5)) as server,
        called(server.address) as slow,
    ):
        slow.say(beginning)
        assert (await ask(server.address)).status == 200
        assert await slow.rest() == b""
        assert refused(server, "greeting_time") == 1
        await until(lambda: not server.http.connections)
        assert server.context.counts.greetings.taken == 0
        assert server.http.traffic.connections == 0


async def test_a_client_that_sends_byte_after_byte_is_cut_off() -> None:
    async with hosted(limits=Limits(greeting_time=0.5)) as server, called(server.address) as slow:
        slow.say(b"GET / HTTP/1.1\r\n")
        rest = asyncio.ensure_future(slow.rest())
        while not rest.done():
            slow.say(b"a")
            await asyncio.sleep(0.01)
        assert await rest == b""


async def test_a_second_request_must_come_whole_in_time() -> None:
    async with hosted(limits=Limits(message_time=0.5)) as server, called(server.address) as client:
        assert (await client.ask()).lasts
        client.say(b"GET /healthz HTTP/1.1\r\nslow: ")
        assert await client.rest() == b""
        assert refused(server, "message_time") == 1


async def test_a_body_must_come_whole_in_time() -> None:
    async with (
        answering(echo, limits=Limits(message_time=0.5)) as server,
        called(server.address) as client,
    ):
        client.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
        assert await client.rest() == b""
        assert refused(server, "message_time") == 1


async def test_an_idle_client_that_was_let_in_may_stay() -> None:
    limits = Limits(message_time=0.2, greeting_time=0.2)
    async with hosted(limits=limits) as server, called(server.address) as client:
        await client.ask()
        await two_ticks(server)
        assert (await client.ask()).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 2 * HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 10 * HEAD_BYTES,
        b"GET /" + b"a" * 2 * HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 4000 + b"\r\n",
    ],
    ids=["header", "unfinished", "path", "many"],
)
@pytest.mark.parametrize("pieces", [True, False])
async def test_a_head_that_is_too_long_is_refused(head: bytes, *, pieces: bool) -> None:
    async with hosted() as server:
        async with called(server.address) as client:
            for start in range(0, len(head), 4096 if pieces else len(head)):
                client.say(head[start : start + (4096 if pieces else len(head))])
                await asyncio.sleep(0)
            answered = await client.rest()
            assert answered[:12] in {b"", b"HTTP/1.1 400", b"HTTP/1.1 431"}
        assert (await ask(server.address)).status == 200
        await until(lambda: not server.http.connections)
        assert server.context.input.total == 0


async def test_a_body_that_is_too_long_is_refused() -> None:
    async with answering(echo) as server:
        for size in (BODY_BYTES, BODY_BYTES + 1, 10 * BODY_BYTES):
            async with called(server.address) as client:
                client.say(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
                client.say(b"a" * size)
                answered = await client.rest() if size > BODY_BYTES else b""
                if size == BODY_BYTES:
                    assert (await client.hear()).body == str(size).encode()
                else:  # a client that goes on sending may be reset before it reads
                    assert answered[:12] in {b"", b"HTTP/1.1 413"}
        async with called(server.address) as client:
            client.say(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            client.say(b"%x\r\n" % (BODY_BYTES + 1) + b"a" * (BODY_BYTES + 1) + b"\r\n")
            assert (await client.hear()).status == 413


@pytest.mark.parametrize(
    "wrong",
    [
        b"\r\n\r\n\r\n",
        b"\x00" * 100,
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\nq",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na\x00b: c\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 300,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_input_that_is_no_http_ends_its_connection_alone(wrong: bytes) -> None:
    async with hosted() as server:
        async with called(server.address) as client:
            client.say(wrong)
            client.writer.write_eof()
            answered = await client.rest()
            assert not answered or answered[:12] in {b"HTTP/1.1 400", b"HTTP/1.1 421"}
        async with called(server.address) as client:
            await client.ask()
            client.say(wrong)
            client.writer.write_eof()
            await client.rest()
        assert (await ask(server.address)).status == 200
        await until(lambda: not server.http.connections)


async def test_input_that_is_no_http_ends_a_response_in_progress_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(_: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async with answering(slow) as server, called(server.address) as client:
        client.say(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await begun.wait()
        client.say(b"no chunk\r\n")
        assert await client.rest() == b""
        may_end.set()
        await until(lambda: not server.http._state.tasks)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_an_upgrade_is_not_made() -> None:
    async with hosted() as server:
        answered = await ask(server.address, connection="upgrade", upgrade="websocket")
        assert answered.status == 200


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    ended = asyncio.Event()

    async def endless(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while not ended.is_set():
                message = {"type": "http.response.body", "body": b"a" * 65536, "more_body": True}
                await send(message)
                await asyncio.sleep(0)
                if not connections():
                    return
        finally:
            ended.set()

    def connections() -> int:
        return len(server.http.connections)

    limits = Limits(output_time=0.5)
    async with answering(endless, limits=limits) as server, called(server.address) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
        client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            await ended.wait()
        assert refused(server, "output_time") == 1


async def test_a_request_that_fails_is_answered_and_the_next_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(_: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("on purpose")

    async with answering(fails) as server:
        answered = await ask(server.address)
        assert answered.status == 500
        assert b"purpose" not in answered.body
        assert "on purpose" in caplog.text
        server.http.service._app = echo
        assert (await ask(server.address)).status == 200


async def test_connections_of_one_source_are_limited() -> None:
    limits = Limits(connections_per_source=2)
    async with (
        hosted(limits=limits) as server,
        called(server.address) as one,
        called(server.address) as other,
    ):
        for client in (one, other):
            await client.ask()
        answered = await ask(server.address)
        assert answered.status == 503
        assert b"connections_per_source" in answered.body
        assert answered.headers["retry-after"] == "1"
        assert not answered.lasts
        assert refused(server, "connections_per_source") == 1
        assert (await one.ask()).status == 200


async def test_health_checks_do_not_take_the_places_of_clients() -> None:
    limits = Limits(connections_per_source=1)
    async with (
        hosted(limits=limits, authenticator=tokens()) as server,
        called(server.address) as client,
    ):
        assert (await client.ask("/metrics", token=READER)).status == 200
        for path in ("/healthz", "/readyz") * 3:
            assert (await ask(server.address, path)).status == 200


async def test_the_oldest_silent_client_yields_its_place() -> None:
    async with (
        hosted(limits=Limits(greetings=2)) as server,
        called(server.address) as first,
        called(server.address),
        called(server.address),
    ):
        assert await first.rest() == b""
        assert (await ask(server.address)).status == 200


async def test_the_end_does_not_wait_for_a_response_that_does_not_end() -> None:
    begun = asyncio.Event()
    cancelled = asyncio.Event()

    async def endless(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with answering(endless) as server, called(server.address) as client:
        client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        async with asyncio.timeout(60):
            await server.http.aclose()
        assert cancelled.is_set()


async def test_an_end_that_is_cancelled_leaves_nothing_open() -> None:
    begun = asyncio.Event()

    async def endless(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        await asyncio.Event().wait()

    async with answering(endless) as server, called(server.address) as client:
        client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        closing = asyncio.ensure_future(server.http.aclose())
        while not server.http.service.health.draining:  # noqa: ASYNC110  nothing else says so
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not server.http.connections
        assert not server.http._state.tasks
        assert not server.context.shared.get(HttpService)


async def test_a_share_that_is_cancelled_leaves_the_service_to_others_or_ends_it() -> None:
    engine = connect_engine("memory://", SystemClock())
    await engine.open()
    context = Context(engine, Limits(), Authenticator(), logging.getLogger("tenure.server"))
    begun = asyncio.all_tasks()

    async def shares(number: int) -> list[asyncio.Task[HttpService]]:
        found = [asyncio.create_task(HttpService.share(context, HttpOptions())) for _ in "ab"]
        for _ in range(number):  # turns of the loop
            await asyncio.sleep(0)
        return found

    for number in range(6):
        one, other = await shares(number)
        one.cancel()
        await asyncio.wait([one])
        service = await other
        assert (await service.health.store.read()) is None
        if not one.cancelled():
            await service.unshare()
        await service.unshare()
        both = await shares(number)
        for each in both:
            each.cancel()
        await asyncio.wait(both)
        for each in both:
            if not each.cancelled():
                await each.result().unshare()
        assert not context.shared
        assert asyncio.all_tasks() == begun
    await context.guard.aclose()
    await engine.aclose()


async def test_an_end_of_the_service_that_is_cancelled_ends_its_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosted() as server:
        service = server.http.service
        stopped, stop = asyncio.Event(), service.health.loop.stop

        def record() -> None:
            stop()
            stopped.set()

        monkeypatch.setattr(service.health.loop, "stop", record)
        closing = asyncio.ensure_future(server.http.aclose())
        running = service._running
        assert running is not None
        while not running.cancelling():  # noqa: ASYNC110  nothing else says so
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert stopped.is_set()


async def test_the_end_waits_for_a_response_in_progress() -> None:
    begun = asyncio.Event()
    may_end = asyncio.Event()

    async def slow(_: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await may_end.wait()
        head = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"ok"})

    async with answering(slow) as server, called(server.address) as client:
        client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        closing = asyncio.ensure_future(server.http.aclose())
        await asyncio.sleep(0)
        may_end.set()
        assert (await client.hear()).body == b"ok"
        await closing


async def flood(server: Hosted, stop: asyncio.Event) -> int:
    """Ask for everything, again and again, until the end."""
    done = 0
    async with called(server.address) as client:
        while not stop.is_set():
            await client.ask("/metrics")
            done += 1
    return done


async def test_clients_that_scrape_without_end_leave_room_for_others() -> None:
    async with hosted() as server:
        stop = asyncio.Event()
        floods = [asyncio.ensure_future(flood(server, stop)) for _ in range(8)]
        async with asyncio.timeout(60):
            for _ in range(20):
                assert (await ask(server.address)).status == 200
        stop.set()
        assert min(await asyncio.gather(*floods)) >= 1
