"""The spans of waits and leases: where they belong, and what they say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from tenure import Lease, blocking
from tenure.errors import AcquireTimeout, EngineError
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns
from tests.telemetry.helpers import Backend


@pytest.fixture(autouse=True)
def virtual_time(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Every coroutine test here runs on the virtual clock."""


@pytest.fixture
def world(clock: VirtualClock) -> World:
    return World(clock)


def facts(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


async def test_a_wait_and_its_lease_are_spans_of_the_caller(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)
        held = await client.mutex("m").lock()
        tracer = backend.tracers.get_tracer("test")
        with tracer.start_as_current_span("request") as around:
            releasing = asyncio.get_running_loop().call_later(3, held._request.withdraw)
            async with client.mutex("m").lock(timeout=10) as lease:
                assert get_current_span() is around  # a lease may change its task
                await asyncio.sleep(2)
            releasing.cancel()
        waits, holds = backend.spans_named("acquire mutex"), backend.spans_named("hold mutex")
        wait, hold = waits[1], holds[1]
        assert parent_of(waits[0]) is parent_of(holds[0]) is None
        assert parent_of(wait) == parent_of(hold) == around.get_span_context().span_id
        assert [link.context.span_id for link in hold.links] == [id_of(wait)]
        session = str(lease.session.id)
        common = {
            "tenure.engine": "memory",
            "tenure.node": "/default",
            "tenure.kind": "mutex",
            "tenure.name": "m",
            "tenure.session.id": session,
            "tenure.fencing_token": lease.fencing_token,
        }
        assert facts(wait) == common | {
            "tenure.outcome": "acquired",
            "tenure.wait.duration": 3.0,
        }
        assert facts(hold) == common | {"tenure.hold.duration": 2.0}
        assert (wait.kind, hold.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)
        assert wait.status.status_code == hold.status.status_code == StatusCode.UNSET


async def test_each_task_has_its_own_trace(world: World, backend: Backend) -> None:
    tracer = backend.tracers.get_tracer("test")
    traces = {}

    async with world.client() as client:
        backend.instrument(client)

        async def work(number: int) -> None:
            with tracer.start_as_current_span(f"task {number}") as span:
                traces[number] = span.get_span_context().trace_id
                async with client.mutex(f"m-{number % 2}").lock():
                    await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(work(number))
    assert len(set(traces.values())) == 6
    for name in ("acquire mutex", "hold mutex"):
        assert {span.context.trace_id for span in backend.spans_named(name)} == set(traces.values())


def test_the_calls_of_threads_belong_to_their_traces(backend: Backend) -> None:
    tracer = backend.tracers.get_tracer("test")
    spans = {}
    begin = threading.Barrier(4)

    with blocking.connect("memory://traced") as client:
        backend.instrument(client)

        def work(number: int) -> None:
            with tracer.start_as_current_span(f"thread {number}") as span:
                spans[number] = span.get_span_context().span_id
                begin.wait(60)
                with client.mutex("m").lock():
                    pass
                with client.mutex("m"):
                    pass

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    for name in ("acquire mutex", "hold mutex"):
        found = [parent_of(span) for span in backend.spans_named(name)]
        assert sorted(map(str, found)) == sorted(2 * [*map(str, spans.values())])


async def test_an_election_has_spans_of_its_own(world: World, backend: Backend) -> None:
    async with world.client() as client, client.session() as session:
        backend.instrument(client)
        async with session.election("e").campaign():
            await asyncio.sleep(2)
        (campaign,), (lead,) = backend.spans_named("campaign"), backend.spans_named("lead")
        assert facts(campaign)["tenure.outcome"] == "acquired"
        assert facts(lead)["tenure.hold.duration"] == 2.0
        assert facts(lead)["tenure.count"] == 1


async def test_a_wait_without_a_lease_says_why(world: World, backend: Backend) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other, other.mutex("m").lock():
        backend.instrument(client)
        mutex = client.mutex("m")
        with pytest.raises(AcquireTimeout):
            await mutex.lock(timeout=2)
        assert await mutex.try_lock() is None
        cancelled = asyncio.create_task(mutex.lock())
        await turns()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        engine.fail("enqueue", EngineError("the disk is full"))
        with pytest.raises(EngineError):
            await mutex.lock()
        spans = backend.spans_named("acquire mutex")
        assert [facts(span)["tenure.outcome"] for span in spans] == [
            *("timed_out", "rejected", "cancelled", "failed")
        ]
        assert [facts(span).get("error.type") for span in spans] == [
            *("timed_out", None, None, "failed")
        ]
        assert [span.status.description for span in spans] == [
            *("not acquired within the timeout", None, None, "the disk is full")
        ]
        assert facts(spans[0])["tenure.wait.duration"] == 2.0
        assert backend.spans_named("hold mutex") == []


async def test_a_lost_lease_is_a_span_that_failed(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)
        lease = await client.mutex("m").lock()
        await asyncio.sleep(5)
        await client.evict("/default", "m", lease.fencing_token)
        await turns()
        (hold,) = backend.spans_named("hold mutex")
        assert facts(hold)["tenure.loss.cause"] == facts(hold)["error.type"] == "evicted"
        assert facts(hold)["tenure.hold.duration"] == 5.0
        assert hold.status.status_code is StatusCode.ERROR
        assert "evicted by an administrator" in str(hold.status.description)


async def test_a_wait_for_a_session_is_a_part_of_the_span(world: World, backend: Backend) -> None:
    client, engine = world.slow()
    async with client:
        backend.instrument(client)
        engine.cut()
        with pytest.raises(AcquireTimeout):
            await client.mutex("m").lock(timeout=4)
        engine.mend()
        async with client.mutex("m").lock() as lease:
            pass
        late, granted = backend.spans_named("acquire mutex")
        assert "tenure.session.id" not in facts(late)
        assert facts(late)["tenure.wait.duration"] == 4.0
        assert facts(granted)["tenure.session.id"] == str(lease.session.id)


async def test_spans_end_with_the_instrumentation(world: World, backend: Backend) -> None:
    async with world.client() as client:
        held = await client.mutex("before").lock()
        handles = backend.instrument(client)
        await held.release()  # it has no span
        held = await client.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await turns()
        for each in handles:
            each.stop()
        assert [span.name for span in backend.spans] == [
            *("acquire mutex", "acquire mutex", "hold mutex")
        ]
        await held.release()
        await (await waiting).release()
        assert len(backend.spans) == 3


async def test_a_span_has_the_place_in_the_queue_if_asked_for(
    world: World, backend: Backend
) -> None:
    async with world.client() as client, world.client() as other:
        backend.instrument(client, positions=True)
        held = await other.mutex("m").lock()
        waiting = []
        for _ in range(3):
            waiting.append(asyncio.create_task(client.mutex("m").lock()))
            await turns()
        await held.release()
        for each in waiting:
            await (await each).release()
        async with client.mutex("free").lock():
            pass
        positions = [
            facts(span).get("tenure.queue.position")
            for span in backend.spans_named("acquire mutex")
        ]
        assert positions == [1, 2, 3, None]


async def test_a_place_that_cannot_be_read_is_missing(
    world: World, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow(5)
    async with client, world.client() as other:
        backend.instrument(client, positions=True)
        held = await other.mutex("m").lock()

        async def waits(number: int) -> list[asyncio.Task[Lease]]:
            locks = [client.mutex("m").lock(timeout=60) for _ in range(number)]
            tasks = [asyncio.create_task(lock) for lock in locks]
            await turns(100)
            return tasks

        engine.fail("describe", EngineError("no"), ZeroDivisionError("a mistake"))
        waiting = [*await waits(2), *await waits(12)]  # more than are read at the same time
        await held.release()
        for each in waiting:
            await (await each).release()
        spans = backend.spans_named("acquire mutex")
        known = [facts(span).get("tenure.queue.position") for span in spans]
        assert known == [None, None, *range(3, 13), None, None]
        assert [each.getMessage() for each in caplog.records] == [
            "could not read the queue: node=/default name='m'"
        ]
