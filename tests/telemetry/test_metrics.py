"""The metrics of a client: what they measure, over which clients, and from when to when."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from tenure import blocking, telemetry
from tenure._client.listeners import Handler, SinkEventKind
from tenure.errors import AcquireTimeout, InvalidArgument, Misuse, SessionClosed
from tenure.telemetry import prometheus, table
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns
from tests.telemetry.helpers import Backend, Distribution


@pytest.fixture(autouse=True)
def virtual_time(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Every coroutine test here runs on the virtual clock."""


@pytest.fixture
def world(clock: VirtualClock) -> World:
    return World(clock)


async def test_the_times_of_waits_and_leases_are_those_of_the_clients_clock(
    world: World, backend: Backend
) -> None:
    async with world.client() as client:
        backend.instrument(client)
        held = await client.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await asyncio.sleep(7)
        assert backend.value(table.WAITERS, kind="mutex") == 1
        assert backend.value(table.LEASES, kind="mutex") == 1
        await held.release()
        lease = await waiting
        await asyncio.sleep(2)
        await lease.release()
        assert backend.distribution(table.WAIT, kind="mutex") == Distribution(2, 7.0)
        assert backend.distribution(table.HOLD, kind="mutex") == Distribution(2, 9.0)
        in_seconds = f"{table.WAIT.in_prometheus}_bucket"
        assert backend.registry.get_sample_value(in_seconds, _labels("mutex", le="5.0")) == 1
        assert backend.registry.get_sample_value(in_seconds, _labels("mutex", le="10.0")) == 2


def _labels(kind: str, **more: str) -> dict[str, str]:
    return {"engine": "memory", "node": "/default", "kind": kind, **more}


async def test_kinds_and_nodes_are_labels(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)
        await client.create_node("/billing")
        async with client.session("/billing") as session, session.election("e").campaign():
            pool = session.semaphore("pool")
            await pool.create(limit=2)
            async with pool.acquire():
                assert backend.value(table.LEASES, node="/billing", kind="election") == 1
                assert backend.value(table.LEASES, node="/billing", kind="semaphore") == 1
                assert backend.value(table.SESSIONS, node="/billing", state="attached") == 1
        assert backend.value(table.ACQUISITIONS, kind="election", outcome="acquired") == 1
        assert backend.value(table.SESSIONS, node="/billing") == 0


async def test_a_renewal_that_is_late_or_unanswered_is_measured(
    world: World, backend: Backend, clock: VirtualClock
) -> None:
    client, engine = world.slow(0)
    async with client:
        backend.instrument(client)
        async with client.session():  # of a window of 30 s, renewed each 9.5 s
            await asyncio.sleep(15)
            punctual = backend.distribution(table.RENEWALS)
            assert punctual.count >= 1
            assert punctual.sum < 0.1
            engine.cut()
            await asyncio.sleep(12)
            late = backend.distribution(table.RENEWALS)
            assert late.count > punctual.count
            assert late.sum > 2
            engine.mend()


async def test_a_lost_lease_is_held_until_its_loss(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)
        session = await client.session()
        lease = await session.mutex("m").lock()
        await asyncio.sleep(4)
        await client.end_session("/default", session.id)
        await turns()
        assert not lease.held
        assert backend.distribution(table.HOLD) == Distribution(1, 4.0)
        assert backend.value(table.LOSSES, cause="session_expired") == 1
        assert backend.value(table.EXPIRATIONS) == 1
        assert backend.value(table.LEASES) == backend.value(table.SESSIONS) == 0


async def test_a_loss_that_the_release_reveals_is_one_loss_of_one_lease(
    world: World, backend: Backend
) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        backend.instrument(client)
        lease = await client.mutex("m").lock()
        engine.back.flowing = False
        await other.evict("/default", "m", lease.fencing_token)
        releasing = asyncio.create_task(lease.release())
        await turns()
        engine.back.flowing = True
        await asyncio.wait([releasing])
        assert releasing.exception() is not None
        assert backend.value(table.LOSSES) == 1
        assert backend.distribution(table.HOLD).count == 1


async def test_a_call_whose_session_is_not_attached_waits_and_times_out(
    world: World, backend: Backend
) -> None:
    client, engine = world.slow()
    async with client:
        backend.instrument(client)
        engine.cut()
        locking = asyncio.create_task(client.mutex("m").lock(timeout=5))
        await turns()
        assert backend.value(table.WAITERS) == 1
        await asyncio.wait([locking])
        assert isinstance(locking.exception(), AcquireTimeout)
        assert backend.value(table.WAITERS) == 0
        assert backend.value(table.ACQUISITIONS, outcome="timed_out") == 1
        engine.mend()


async def test_the_metrics_can_be_read_in_both_formats_of_prometheus(
    world: World, backend: Backend
) -> None:
    async with world.client() as client:
        backend.instrument(client)
        async with client.mutex("m").lock():
            await asyncio.sleep(2)
        plain = text_string_to_metric_families(generate_latest(backend.registry).decode())
        # These two have no types.
        text = openmetrics_text(backend.registry)  # type: ignore[no-untyped-call]
        openmetrics = openmetrics_families(text.decode())  # type: ignore[no-untyped-call]
        for families in (list(plain), list(openmetrics)):
            values = {
                each.name: each.value
                for family in families
                for each in family.samples
                if each.labels.get("kind") == "mutex" and "le" not in each.labels
            }
            assert values == {
                "tenure_client_acquisitions_total": 1.0,
                "tenure_client_wait_duration_seconds_count": 1.0,
                "tenure_client_wait_duration_seconds_sum": 0.0,
                "tenure_client_hold_duration_seconds_count": 1.0,
                "tenure_client_hold_duration_seconds_sum": 2.0,
                "tenure_client_waiters": 0.0,
                "tenure_client_leases": 0.0,
            }


# From when to when


async def test_what_there_is_already_counts_from_the_beginning(
    world: World, backend: Backend
) -> None:
    async with world.client() as client:
        held = await client.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await turns()
        backend.instrument(client)
        assert backend.value(table.SESSIONS, state="attached") == 1
        assert backend.value(table.LEASES) == backend.value(table.WAITERS) == 1
        await held.release()
        lease = await waiting
        assert backend.value(table.WAITERS) == 0
        assert backend.value(table.LEASES) == 1
        assert backend.value(table.ACQUISITIONS, outcome="acquired") == 1
        await lease.release()
        assert backend.value(table.LEASES) == 0


async def test_a_wait_for_a_session_that_has_begun_before_counts_once_it_is_sent(
    world: World, backend: Backend
) -> None:
    client, engine = world.slow()
    async with client:
        engine.back.flowing = False
        early = [asyncio.create_task(client.mutex(name).lock()) for name in "ab"]
        await turns()
        backend.instrument(client)
        early[1].cancel()
        await turns()
        assert backend.value(table.WAITERS) == 0
        engine.back.flowing = True
        lease = await early[0]
        assert backend.value(table.LEASES) == 1
        await lease.release()
        assert backend.value(table.WAITERS) == 0


async def test_stopped_it_counts_no_more_and_stopping_twice_is_safe(
    world: World, backend: Backend
) -> None:
    async with world.client() as client:
        handles = backend.instrument(client)
        async with client.mutex("m").lock():
            for each in handles:
                assert each.active
                each.stop()
                each.stop()
                assert not each.active
        assert client._core.listeners.sinks == ()
        assert generate_latest(backend.registry) == b""
        acquired = {"kind": "mutex", "outcome": "acquired"}
        assert backend.otel_value(table.ACQUISITIONS, acquired) == 1
        assert backend.otel_value(table.LEASES, {}) == 0
        backend.instrument(client)  # and again
        async with client.mutex("m").lock():
            pass
        assert backend.otel_value(table.ACQUISITIONS, acquired) == 2
        assert backend.prometheus_value(table.ACQUISITIONS, acquired) == 1


async def test_it_ends_with_the_client_and_its_counts_remain(
    world: World, backend: Backend
) -> None:
    for number in range(3):
        async with world.client() as client:
            handles = backend.instrument(client)
            async with client.mutex("m").lock():
                assert backend.value(table.LEASES) == 1
        assert not any(each.active for each in handles)
        assert backend.value(table.ACQUISITIONS) == number + 1
        assert backend.distribution(table.WAIT).count == number + 1
        assert backend.value(table.LEASES) == backend.value(table.SESSIONS) == 0
        for each in handles[:number]:
            each.stop()


async def test_clients_of_one_backend_are_added_up(world: World, backend: Backend) -> None:
    async with world.client() as one, world.client() as other:
        backend.instrument(one)
        backend.instrument(other)
        async with one.mutex("a").lock(), other.mutex("b").lock():
            assert backend.value(table.LEASES) == 2
            assert backend.value(table.SESSIONS, state="attached") == 2
        assert backend.value(table.ACQUISITIONS, outcome="acquired") == 2
        assert backend.distribution(table.HOLD).count == 2


async def test_a_client_reports_to_a_backend_once(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)
        with pytest.raises(Misuse, match="instrumented already"):
            prometheus.instrument(client, registry=backend.registry)
        with pytest.raises(Misuse, match="instrumented already"):
            telemetry.instrument(client, meter_provider=backend.meters, traces=False)
        with pytest.raises(Misuse, match="instrumented already"):
            telemetry.instrument(client, tracer_provider=backend.tracers, metrics=False)
        another = prometheus.instrument(client, registry=CollectorRegistry())
        async with client.mutex("m").lock():
            pass
        assert backend.value(table.ACQUISITIONS) == 1
        another.stop()


async def test_a_client_that_is_dropped_is_closed_and_reports_no_more(
    world: World, backend: Backend
) -> None:
    client = world.client()
    handles = backend.instrument(client)
    async with client.mutex("m").lock():
        assert backend.value(table.SESSIONS) == 1
    left = [client]
    del client
    with pytest.warns(ResourceWarning, match="the client of memory://"):
        left.clear()
    await turns(100)
    assert not any(each.active for each in handles)
    assert backend.value(table.SESSIONS) == 0
    assert backend.value(table.ACQUISITIONS) == 1


def test_any_thread_stops_it(backend: Backend) -> None:
    with blocking.connect("memory://stopped") as client:
        handles = backend.instrument(client)
        with client.mutex("m").lock():
            for each in handles:
                each.stop()
                assert not each.active
            client.list_nodes()  # what stop() has scheduled before is done
            assert backend.otel_value(table.LEASES, {}) == 0
            assert [span.name for span in backend.spans] == ["acquire mutex", "hold mutex"]


async def test_a_decorated_call_is_a_wait_of_its_caller(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)

        @client.exclusive("report {number}")
        async def report(number: int) -> None:
            assert backend.value(table.LEASES) == 1

        with backend.tracers.get_tracer("test").start_as_current_span("request") as around:
            await report(7)
        (hold,) = backend.spans_named("hold mutex")
        assert hold.parent is not None
        assert hold.parent.span_id == around.get_span_context().span_id
        assert (hold.attributes or {})["tenure.name"] == "report 7"


# Names


async def test_names_are_labels_only_if_asked_for(world: World, backend: Backend) -> None:
    async with world.client() as client:
        backend.instrument(client)
        async with client.mutex("m").lock():
            pass
        text = generate_latest(backend.registry).decode()
        assert "name=" not in text
        assert 'tenure_client_leases{engine="memory",kind="mutex",node="/default"} 0.0' in text


async def test_names_are_labels_and_a_callable_chooses_them(world: World, backend: Backend) -> None:
    async with world.client() as one, world.client() as other, world.client() as third:
        backend.instrument(one)
        backend.instrument(other, names=True)
        backend.instrument(third, names=lambda name: name.partition(" ")[0])
        async with (
            one.mutex("a").lock(),
            other.mutex("b").lock(),
            third.mutex("report 1").lock(),
            third.mutex("report 2").lock(),
        ):
            assert backend.value(table.LEASES, name="b") == 1
            assert backend.value(table.LEASES, name="report") == 2
            assert backend.value(table.LEASES) == 4
        assert backend.distribution(table.HOLD, name="report").count == 2
        assert backend.value(table.ACQUISITIONS, name="report", outcome="acquired") == 2


# What goes wrong


async def test_it_takes_clients_alone_that_are_open(world: World, backend: Backend) -> None:
    with pytest.raises(InvalidArgument, match=r"a client of tenure or tenure\.blocking, not 42"):
        telemetry.instrument(42)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not 42"):
        prometheus.instrument(42, registry=backend.registry)  # type: ignore[arg-type]
    client = world.client()
    with pytest.raises(InvalidArgument, match="not neither"):
        telemetry.instrument(client, traces=False, metrics=False)
    async with client:
        pass
    with pytest.raises(SessionClosed):
        backend.instrument(client)
    assert generate_latest(backend.registry) == b""


def test_a_client_of_another_loop_is_not_instrumented(backend: Backend, world: World) -> None:
    client = world.client()

    async def use() -> None:
        await client.list_nodes()

    with asyncio.Runner() as runner:
        runner.run(use())
        with pytest.raises(Misuse, match="event loop"):
            prometheus.instrument(client, registry=backend.registry)
        runner.run(client.aclose())


class Failing:
    """A sink that fails at each event."""

    destination = None

    def __init__(self) -> None:
        kinds: tuple[SinkEventKind, ...] = ("Requested", "Sent", "Queued", "Renewing")
        self.handlers: dict[SinkEventKind, Handler] = {
            kind: partial(self.fail, kind) for kind in kinds
        }

    def fail(self, kind: str, *_: object) -> None:
        raise ZeroDivisionError(kind)

    def closed(self) -> None:
        raise ZeroDivisionError("at the end")


async def test_a_sink_that_fails_is_logged_and_breaks_nothing(
    world: World, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.client() as client:
        client._core.listeners.add(Failing())
        backend.instrument(client)
        async with client.mutex("m").lock() as lease:
            with pytest.raises(AcquireTimeout):
                await client.mutex("m").lock(timeout=1)
            await asyncio.sleep(15)
            assert lease.held
        assert backend.value(table.ACQUISITIONS) == 2
    logged = [each.getMessage() for each in caplog.records]
    assert logged == [
        f"background task failed: task='telemetry' error=ZeroDivisionError({what!r})"
        for what in ("Requested", "Sent", "Queued", "Renewing", "at the end")
    ]


FORKED = """
import asyncio, multiprocessing, tenure
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from tenure import telemetry
from tenure.telemetry import prometheus

registry, reader = CollectorRegistry(), InMemoryMetricReader()
meters = MeterProvider([reader])

def counted():
    lines = generate_latest(registry).decode().splitlines()
    scraped = [line for line in lines if line.startswith("tenure_client_acquisitions_total{")]
    read = [
        point.value
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "tenure.client.acquisitions"
        for point in metric.data.data_points
    ]
    assert read == [float(line.split()[-1]) for line in lines if line in scraped], (read, scraped)
    return sum(read)

async def acquire(times):
    async with tenure.connect("memory://") as client:
        prometheus.instrument(client, registry=registry)
        telemetry.instrument(client, traces=False, meter_provider=meters)
        for _ in range(times):
            async with client.mutex("m").lock():
                pass

def in_the_child():
    assert counted() == 0
    asyncio.run(acquire(2))
    assert counted() == 2

asyncio.run(acquire(1))
assert counted() == 1
child = multiprocessing.get_context("fork").Process(target=in_the_child)
child.start()
child.join()
assert child.exitcode == 0
assert counted() == 1
"""


def test_a_forked_child_reports_its_own_clients_and_nothing_of_its_parent() -> None:
    assert "fork" in multiprocessing.get_all_start_methods()
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("opentelemetry", "telemetry", "otel"),
        ("prometheus_client", "telemetry.prometheus", "prometheus"),
    ],
)
def test_a_missing_extra_is_named(package: str, module: str, extra: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
import tenure, tenure.telemetry.prometheus
client = tenure.connect("memory://")
try:
    tenure.{module}.instrument(client)
except tenure.Unsupported as error:
    assert "pip install 'tenure[{extra}]'" in str(error), error
else:
    raise AssertionError("it is there")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_a_call_neither_library_is_imported() -> None:
    program = """
import sys, tenure, tenure.telemetry, tenure.telemetry.prometheus
loaded = [name for name in sys.modules if name.startswith(("opentelemetry", "prometheus_client"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
