"""Live updates of open pages, as server-sent events.

Rules:

* **Topics.** Browsers of the same visitor that show the same page share a topic. Its content is
  rendered once for all of them, at most once in `INTERVAL` seconds.
* **Bounded work.** Rendering takes at most one part in `SHARE` of the time. With many topics each
  is rendered less often. A topic whose store does not answer within `DELAY` seconds delays no
  others, and does not count.
* **Latest only.** A browser that reads slowly gets the latest content, and nothing queues up for
  it. One that has read nothing for `STUCK` seconds leaves its topic, and is disconnected when it
  reads again.
* **Sign-ins.** A stream ends when its visitor is not valid any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from tenure.background import Failures
from tenure.clock import Clock
from tenure.console.access import Visitor
from tenure.errors import TenureError

INTERVAL = 1.0
SHARE = 4
DELAY = 0.25
"""Seconds for which the rendering of one topic delays the next."""

STUCK = 15.0
QUIET = 15.0
"""Seconds after which an unchanged stream gets a comment, which shows a broken connection."""

MOST_STREAMS = 500
MOST_OF_ONE = 250
"""Open streams of one console, and those of one visitor."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

Render = Callable[[Visitor], Awaitable[str]]
"""Returns the present content of a page for a visitor."""


@dataclass(slots=True)
class Topic:
    """A page that browsers of one visitor show.

    Attributes:
        render: renders its content.
        streams: the streams of its browsers.
        content: the latest event; empty before the first.
        rendering: the latest rendering.
    """

    render: Render
    streams: set[LiveStream] = field(default_factory=set)
    content: bytes = b""
    rendering: asyncio.Task[None] | None = None


class LiveStream:
    """The stream of one browser, as an ASGI application."""

    def __init__(self, hub: Hub, key: object, visitor: Visitor) -> None:
        self.visitor = visitor
        self._hub = hub
        self._key = key
        self._news = asyncio.Event()
        self._content = b""
        self._over = False

    def put(self, content: bytes) -> None:
        """Replace the content that is not sent yet."""
        self._content = content
        self._news.set()

    def end(self, content: bytes = b"") -> None:
        """End the stream, after `content`."""
        self._over = True
        self.put(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the browser or the console ends the stream."""
        del scope
        leaving = asyncio.create_task(_until_disconnected(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({leaving, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.remove(self._key, self)
            self._hub.closed(self)
            for task in (leaving, sending):
                task.cancel()
            found = await asyncio.gather(leaving, sending, return_exceptions=True)
        for each in found:
            if isinstance(each, Exception):
                raise each

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        content = b"retry: 3000\n\n"
        while True:
            sent = asyncio.ensure_future(
                send({"type": "http.response.body", "body": content, "more_body": True})
            )
            try:
                if not (await asyncio.wait({sent}, timeout=STUCK))[0]:
                    self._hub.remove(self._key, self)
                    self._over = True
                await sent
            finally:
                sent.cancel()
            if self._over and not self._news.is_set():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            content = await self._next()

    async def _next(self) -> bytes:
        """Return what to send next."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET):
                await self._news.wait()
        if not self._news.is_set():
            return b": still here\n\n"
        self._news.clear()
        return self._content


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Hub:
    """All topics of a console.

    Args:
        clock: measures the time that rendering takes.
        still_valid: returns false for a visitor that has to sign in again.
        logger: logs errors of rendering.
    """

    def __init__(
        self, clock: Clock, still_valid: Callable[[Visitor], bool], logger: logging.Logger
    ) -> None:
        self._clock = clock
        self._still_valid = still_valid
        self._failures = Failures("updating pages of the console", logger)
        self._topics: dict[object, Topic] = {}
        self._some = asyncio.Event()
        self._open: Counter[str] = Counter()

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return self._open.total()

    def stream(self, key: object, visitor: Visitor, render: Render) -> LiveStream | None:
        """Return a new stream of a topic, or ``None`` if there are too many streams."""
        if self.streams >= MOST_STREAMS or self._open[visitor.name] >= MOST_OF_ONE:
            return None
        self._open[visitor.name] += 1
        topic = self._topics.setdefault(key, Topic(render))
        stream = LiveStream(self, key, visitor)
        topic.streams.add(stream)
        if topic.content:
            stream.put(topic.content)
        self._some.set()
        return stream

    def remove(self, key: object, stream: LiveStream) -> None:
        """Remove a stream from its topic. Safe to call twice."""
        topic = self._topics.get(key)
        if topic is not None:
            topic.streams.discard(stream)
            if not topic.streams:
                del self._topics[key]

    def closed(self, stream: LiveStream) -> None:
        """Record that a stream has ended."""
        name = stream.visitor.name
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]

    def end_streams(self) -> None:
        """End all streams; browsers connect again when the server is back."""
        for topic in list(self._topics.values()):
            for stream in list(topic.streams):
                stream.end()

    async def run(self) -> None:
        """Render topics until it is cancelled."""
        async with asyncio.TaskGroup() as renderings:
            while True:
                if not self._topics:
                    self._some.clear()
                await self._some.wait()
                took = 0.0
                for topic in list(self._topics.values()):
                    began = self._clock.now()
                    if await self._update(topic, renderings):
                        took += self._clock.now() - began
                await asyncio.sleep(max(INTERVAL, (SHARE - 1) * took))

    async def _update(self, topic: Topic, renderings: asyncio.TaskGroup) -> bool:
        """Render a topic; return false if that takes longer, and continues."""
        for stream in list(topic.streams):
            if not self._still_valid(stream.visitor):
                stream.end(_event("over", ""))
                topic.streams.discard(stream)
        if not topic.streams:
            return True
        if topic.rendering is not None and not topic.rendering.done():
            return False
        visitor = next(iter(topic.streams)).visitor
        topic.rendering = renderings.create_task(self._render(topic, visitor))
        done, _ = await asyncio.wait({topic.rendering}, timeout=DELAY)
        return bool(done)

    async def _render(self, topic: Topic, visitor: Visitor) -> None:
        """Render a topic, and pass a change to its browsers."""
        try:
            content = _event("main", await topic.render(visitor))
        except TenureError as error:
            content = _event("trouble", str(error))
        except Exception as error:
            self._failures.report(error)
            content = _event("trouble", "this page cannot be updated; the server's log says why")
        if content != topic.content:
            topic.content = content
            for stream in topic.streams:
                stream.put(content)


def _event(kind: str, data: str) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
