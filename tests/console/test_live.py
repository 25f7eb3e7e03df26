"""Live pages: what browsers receive, and that slow ones cost nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from tenure.clock import SystemClock
from tenure.console import live
from tenure.console.live import Hub
from tenure.console.local import LocalVisitor
from tenure.errors import EngineUnavailable
from tenure.testing import VirtualClock
from tests.console.serving import attached, enqueue, from_here, served, until_streams_end

Event = tuple[str, str]


@asynccontextmanager
async def events(browser: httpx.AsyncClient, path: str) -> AsyncIterator[AsyncIterator[Event]]:
    """Open the stream of a page."""

    async def read(response: httpx.Response) -> AsyncIterator[Event]:
        kind = ""
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)

    async with browser.stream("GET", path) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield read(response)


async def until(found: AsyncIterator[Event], fits: Callable[[str, str], bool]) -> str:
    async with asyncio.timeout(60):
        async for kind, text in found:
            if fits(kind, text):
                return text
    raise AssertionError("the stream has ended")


async def test_a_page_follows_the_store() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        worker, other = await attached(console.store), await attached(console.store)
        async with events(browser, "/live/semaphore?name=nightly") as found:
            first = await until(found, lambda kind, text: kind == "main")
            assert "<html" not in first
            assert "it has no holder and no waiter" in first
            await enqueue(worker, 1, "nightly", data=b"<first>")
            await until(
                found, lambda _, text: "Held, no waiters" in text and "&lt;first&gt;" in text
            )
            await enqueue(other, 1, "nightly")
            await until(found, lambda _, text: "Held, 1 waiter<" in text)
            await console.store.end_session("/default", worker.id)
            await until(found, lambda _, text: "Held, no waiters" in text)
            # Later, the observer has seen it, too.
            await until(found, lambda _, text: 'class="what granted"' in text)


async def test_the_part_is_that_of_the_page() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        await attached(console.store, text="a worker")
        async with events(browser, "/live/sessions?search=work") as found:
            part = await until(found, lambda kind, text: "a worker" in text)
        page = (await browser.get("/sessions?search=work")).text
        assert (
            part.splitlines()[:8]
            == page[page.index('<div id="content">\n') + 19 :].splitlines()[:8]
        )


async def test_a_stranger_has_no_stream() -> None:
    async with served() as console:
        assert (await console.browser.get("/live")).status_code == 401
        assert (await console.browser.get("/live/sessions")).status_code == 401


async def test_a_stream_ends_with_the_token() -> None:
    async with (
        served() as console,
        console.signed_in("reader") as browser,
        events(browser, "/live") as found,
    ):
        await until(found, lambda kind, _: kind == "main")
        console.door.set({"admin": {"/": "administer"}})
        await until(found, lambda kind, _: kind == "over")
        async for _ in found:
            raise AssertionError("nothing follows")


async def test_a_stream_shows_no_node_that_the_visitor_may_not_read() -> None:
    async with (
        served() as console,
        console.signed_in("billing") as browser,
        events(browser, "/live/semaphores?node=/default") as found,
    ):
        text = await until(found, lambda kind, _: kind == "trouble")
        assert "may not acquire" in text or "may not use" in text


async def test_an_outage_is_shown_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        served() as console,
        console.signed_in("reader") as browser,
        events(browser, "/live") as found,
    ):
        await until(found, lambda kind, _: kind == "main")

        async def fails() -> Any:
            raise EngineUnavailable("the store is unreachable: it burns")

        monkeypatch.setattr(console.store, "list_nodes", fails)
        text = await until(found, lambda kind, _: kind == "trouble")
        assert "it burns" in text
        page = await browser.get("/")
        assert page.status_code == 503
        assert "it burns" in page.text
        monkeypatch.undo()
        await until(found, lambda kind, _: kind == "main")


async def test_browsers_of_one_visitor_share_the_work() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        hub = console.console.hub
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(events(browser, "/live")) for _ in range(20)]
            for found in streams:
                await until(found, lambda kind, _: kind == "main")
            assert hub.streams == 20
            assert len(hub._topics) == 1
        await until_streams_end(console)
        assert hub._topics == {}


async def test_there_are_not_too_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_STREAMS", 2)
    async with (
        served() as console,
        console.signed_in("reader") as browser,
        events(browser, "/live") as one,
        events(browser, "/live") as two,
    ):
        for each in (one, two):
            await until(each, lambda kind, _: kind == "main")
        assert (await browser.get("/live")).status_code == 503


async def test_one_visitor_cannot_take_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_OF_ONE", 1)
    async with (
        served() as console,
        console.signed_in("reader") as browser,
        console.signed_in("admin") as another,
        events(browser, "/live") as one,
    ):
        await until(one, lambda kind, _: kind == "main")
        assert (await browser.get("/live")).status_code == 503
        async with events(another, "/live") as two:
            await until(two, lambda kind, _: kind == "main")


async def test_a_browser_that_does_not_read_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STUCK", 0.3)
    async with served() as console, console.signed_in("reader") as browser:
        hub = console.console.hub
        worker = await attached(console.store)
        for number in range(1, 400):
            await enqueue(worker, number, f"{number:03}-" + "x" * 900)
        (cookie,) = [f"{name}={value}" for name, value in browser.cookies.items()]
        host = console.url.removeprefix("http://")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, (host.partition(":")[0], int(host.partition(":")[2])))
            lines = "GET /live/semaphores?limit=400 HTTP/1.1", f"Host: {host}", f"Cookie: {cookie}"
            await loop.sock_sendall(slow, "\r\n".join([*lines, "", ""]).encode())
            async with asyncio.timeout(60):
                while not hub.streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                number = 400
                while hub._topics:  # it leaves its topic
                    await console.store.end_session("/default", worker.id)
                    worker = await attached(console.store)
                    for each in range(number, number + 300):
                        await enqueue(worker, each, f"{each:03}-" + "y" * 900)
                    number += 300
                    await asyncio.sleep(0.05)
            assert hub.streams == 1
        await until_streams_end(console)


async def test_a_failure_of_one_page_leaves_the_others() -> None:
    hub = Hub(SystemClock(), lambda visitor: True, logging.getLogger("tests.console"))
    visitor: Any = LocalVisitor(None, administer=False)  # type: ignore[arg-type]

    async def fails(_: Any) -> str:
        raise RuntimeError("no page")

    async def works(_: Any) -> str:
        return "fine"

    running = asyncio.create_task(hub.run())
    bad, good = hub.stream("bad", visitor, fails), hub.stream("good", visitor, works)
    assert bad is not None
    assert good is not None
    async with asyncio.timeout(60):
        await asyncio.gather(bad._news.wait(), good._news.wait())
    assert b"cannot be updated" in bad._content
    assert b"fine" in good._content
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.usefixtures("loop_factory")
async def test_pages_of_a_silent_store_say_so_soon_and_recover_soon(clock: VirtualClock) -> None:
    """However many there are: each rendering waits for its own answer."""
    answers = asyncio.Event()

    async def renders(_: Any) -> str:
        try:
            async with asyncio.timeout(5):
                await answers.wait()
        except TimeoutError:
            raise EngineUnavailable("the store has not answered within 5 s") from None
        return "the page"

    hub = Hub(clock, lambda visitor: True, logging.getLogger("tests.console"))
    visitor: Any = LocalVisitor(None, administer=False)  # type: ignore[arg-type]
    running = asyncio.create_task(hub.run())
    streams = [hub.stream(number, visitor, renders) for number in range(20)]
    await asyncio.sleep(15)
    assert all(each is not None and b"has not answered" in each._content for each in streams)
    answers.set()
    await asyncio.sleep(15)
    assert all(each is not None and b"the page" in each._content for each in streams)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1


async def test_a_console_that_ends_ends_its_streams() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        async with events(browser, "/live") as found:
            await until(found, lambda kind, _: kind == "main")
            console.console.end_streams()
            async with asyncio.timeout(60):
                async for _ in found:
                    pass
        response = await browser.post("/sign-out", headers=from_here(browser))
        assert response.status_code == 303
