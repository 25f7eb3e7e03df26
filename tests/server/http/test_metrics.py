"""The metrics: as many as happened, in a form that Prometheus reads."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

import tenure
from tenure.clock import Clock
from tenure.engines.contract import Removal
from tenure.errors import SessionExpired
from tenure.model import Recovered
from tenure.server.auth.identity import Permissions
from tenure.server.http.metrics import METRICS, Exposition
from tenure.server.http.options import HttpOptions
from tenure.server.meter import OTHERS, OUTCOMES, Histogram, Meter, NodeMeter, RequestTimes, end_of
from tests.server.http.asking import READER, Answered, ask, hosted
from tests.server.http.prometheus import program
from tests.server.http.test_answers import tokens


class Times:
    """The requests of one session, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.meter = Meter()
        self.times = RequestTimes(self.meter, "/n", lambda: self.now)
        self.times.attached()

    @property
    def node(self) -> NodeMeter:
        return self.meter.nodes["/n"]

    @property
    def waits(self) -> tuple[int, float]:
        return sum(self.meter.waits.counts), self.meter.waits.sum

    @property
    def holds(self) -> tuple[int, float]:
        return sum(self.meter.holds.counts), self.meter.holds.sum


def test_a_wait_and_a_hold_are_measured() -> None:
    it = Times()
    it.times.sent(1)
    assert (it.node.waiting, it.node.held) == (1, 0)
    it.now += 3
    it.times.granted(1)
    assert (it.node.waiting, it.node.held) == (0, 1)
    it.now += 5
    it.times.left(1)
    assert (it.waits, it.holds) == ((1, 3.0), (1, 5.0))
    assert (it.node.requests, it.node.grants, it.node.held) == (1, 1, 0)


def test_an_event_that_is_repeated_counts_once() -> None:
    it = Times()
    it.times.sent(1)
    for _ in range(3):
        it.times.granted(1)
    for _ in range(3):
        it.times.left(1)
        it.times.granted(1)
        it.times.removed(1, Removal.EVICTED)
    it.times.over("closed")
    it.times.over("expired", "session_expired")
    assert (it.node.grants, it.waits[0], it.holds[0]) == (1, 1, 1)
    assert (it.node.held, it.node.waiting, it.node.sessions) == (0, 0, 0)
    assert it.node.losses.total() == it.node.outcomes.total() == 0
    assert it.node.ends == {"closed": 1}


@pytest.mark.parametrize(
    ("why", "outcome", "loss"),
    [
        (Removal.TIMED_OUT, "timed_out", "other"),
        (Removal.DELETED, "removed", "deleted"),
        (Removal.EVICTED, "removed", "evicted"),
        (Removal.UNCONFIRMED, "removed", "unconfirmed"),
        (Removal.CUT_OFF, "removed", "cut_off"),
        (Removal.LAPSED, "removed", "lapsed"),
        (Removal.resized(3), "removed", "other"),
    ],
)
def test_a_removal_is_the_end_of_a_wait_or_a_loss(why: Removal, outcome: str, loss: str) -> None:
    it = Times()
    it.times.sent(1)
    it.times.granted_at_once(2)
    for number in (1, 2):
        it.times.removed(number, why)
    assert it.node.outcomes == {outcome: 1}
    assert it.node.losses == {loss: 1}
    assert (it.node.waiting, it.node.held) == (0, 0)


@pytest.mark.parametrize(
    ("taken_over", "end", "cause"),
    [(False, "expired", "session_expired"), (True, "taken_over", "session_taken_over")],
)
def test_a_session_that_ends_loses_what_it_has(taken_over: bool, end: str, cause: str) -> None:
    it = Times()
    it.times.sent(1)
    for number in (2, 3):
        it.times.granted_at_once(number)
    it.now += 2
    it.times.over(*end_of(SessionExpired("gone", taken_over=taken_over)))
    assert it.node.ends == {end: 1}
    assert it.node.losses == {cause: 2}
    assert it.node.outcomes == {"session_ended": 1}
    assert it.holds == (2, 4.0)


def test_what_is_recovered_is_counted_and_not_measured() -> None:
    it = Times()
    requests = [
        Recovered(n, "m", n, 1, b"", True, granted) for n, granted in ((1, True), (2, False))
    ]
    it.times.recovered(requests)
    it.times.recovered(requests)
    assert (it.node.held, it.node.waiting, it.node.requests) == (1, 1, 0)
    it.times.granted(2)
    it.now += 1
    for number in (1, 2):
        it.times.left(number)
    assert it.waits == (0, 0.0)
    assert it.holds == (1, 1.0)  # of the second, which was granted here


def test_what_is_detached_has_neither_ended_nor_been_lost() -> None:
    it = Times()
    it.times.granted_at_once(1)
    it.times.sent(2)
    it.times.over("detached")
    assert (it.node.held, it.node.waiting, it.node.sessions) == (0, 0, 0)
    assert it.node.ends == {"detached": 1}
    assert it.node.losses.total() == it.node.outcomes.total() == it.holds[0] == 0


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]


def test_the_first_nodes_have_counts_of_their_own() -> None:
    meter = Meter(nodes=2)
    made = [meter.node(path) for path in ("/a", "/b", "/c", "/d", "/a")]
    assert made[2] is made[3] is meter.nodes[OTHERS]
    assert made[0] is made[4] is not made[1]
    assert list(meter.nodes) == [OTHERS, "/a", "/b"]


async def test_all_that_clients_did_is_counted_exactly() -> None:
    async with hosted() as server:
        url = server.native.address
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            await client.create_node("/billing")
            async with client.session("/billing") as session:
                for _ in range(5):
                    async with session.mutex("free").lock():
                        pass
                held = await session.mutex("held").lock()
                async with other.session("/billing") as rival:
                    assert await rival.mutex("held").try_lock() is None
                    with pytest.raises(tenure.AcquireTimeout):
                        await rival.mutex("held").lock(timeout=0.1)
                    ticket = rival.mutex("held").enqueue()
                    async with ticket:
                        await server.scrape(
                            lambda it: it.value("tenure_waiters", node="/billing") == 1
                        )
                    waiting = asyncio.ensure_future(rival.mutex("held").lock())
                    found = await server.scrape(
                        lambda it: it.value("tenure_waiters", node="/billing") == 1
                    )
                    assert found.value("tenure_leases", node="/billing") == 1
                    assert found.value("tenure_sessions", node="/billing") == 2
                    await held.release()
                    lease = await waiting
                    (owner,) = (await client.describe_semaphore("held", "/billing")).owners
                    assert await client.evict("/billing", "held", owner.order_id)
                    await lost(lease)
                doomed = await other.session("/billing")
                lease = await doomed.mutex("held").lock()
                assert await client.end_session("/billing", doomed.id)
                await lost(lease)
                await doomed.aclose()
            with pytest.raises(tenure.TenureError):
                await client.describe_node("/nowhere")

        def so(it: Answered) -> bool:
            open_ = it.value("tenure_connections", listener="tenure://127.0.0.1:0")
            return it.value("tenure_sessions", node="/billing") == 0 and open_ == 0

        found = await server.scrape(so)
    node = {"node": "/billing"}
    assert found.value("tenure_sessions_opened_total", **node) == 3
    assert found.value("tenure_sessions_ended_total", end="closed") == 2
    assert found.value("tenure_sessions_ended_total", end="expired") == 1
    # five free ones; held by the first, refused, timed out, withdrawn, granted after the first;
    # by the last session
    assert found.value("tenure_requests_total", **node) == 5 + 1 + 1 + 1 + 1 + 1 + 1
    assert found.value("tenure_grants_total", **node) == 5 + 1 + 1 + 1
    assert found.value("tenure_wait_seconds_count") == 8
    assert found.value("tenure_hold_seconds_count") == 8
    assert found.value("tenure_wait_seconds_bucket", le="0.001") >= 7
    busy, timed_out, withdrawn, removed, ended = (
        found.value("tenure_requests_not_granted_total", outcome=outcome) for outcome in OUTCOMES
    )
    assert (busy, timed_out + withdrawn, removed, ended) == (1, 2, 0, 0)  # client or store is first
    assert found.value("tenure_requests_timed_out_total", **node) == timed_out
    assert found.value("tenure_leases_lost_total", **node) == 2
    assert found.value("tenure_losses_total", cause="evicted") == 1
    assert found.value("tenure_losses_total", cause="session_expired") == 1
    assert found.value("tenure_waiters", **node) == found.value("tenure_leases", **node) == 0
    listener = {"listener": "tenure://127.0.0.1:0"}
    assert found.value("tenure_connections_opened_total", **listener) == 2
    assert found.value("tenure_received_bytes_total", **listener) > 500
    assert found.value("tenure_sent_bytes_total", **listener) > 500


async def lost(lease: tenure.Lease) -> None:
    async with asyncio.timeout(60):
        await lease.wait_lost()


def checked_by_promtool(text: bytes) -> tuple[int, bytes, bytes]:
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, check=False
    )
    return checked.returncode, checked.stdout, checked.stderr


async def test_every_metric_of_the_list_is_exposed_and_promtool_has_no_complaint() -> None:
    async with (
        hosted(options=HttpOptions(identities=5)) as server,
        tenure.connect(server.native.address) as client,
        client.mutex("m").lock(),
    ):
        server.context.refused("connection refused", "connections", peer="x")
        answered = await server.scrape(lambda it: it.value("tenure_leases", node="/default") == 1)
    exposed = {name for name, _ in answered.samples}
    for metric in METRICS:
        suffix = "_bucket" if metric.type == "histogram" else ""
        assert metric.name + suffix in exposed, metric.name
    assert all(name.startswith(("process_", "tenure_")) for name in exposed)
    assert answered.value("tenure_identity_usage", identity="anonymous", resource="requests") == 1
    assert answered.value("tenure_usage", resource="requests") == 1
    assert answered.value("tenure_limit", resource="requests") == 500_000
    assert await asyncio.to_thread(checked_by_promtool, answered.body) == (0, b"", b"")


async def test_nodes_beyond_the_bound_are_added_up() -> None:
    async with hosted(nodes=2) as server:
        async with tenure.connect(server.native.address) as client:
            for number in range(4):
                await client.create_node(f"/n{number}")
                async with client.session(f"/n{number}") as session, session.mutex("m").lock():
                    pass
        found = await server.scrape(lambda it: it.value("tenure_grants_total", node=OTHERS) == 2)
    shown = {dict(labels)["node"] for name, labels in found.samples if name == "tenure_sessions"}
    assert shown == {"/n0", "/n1", OTHERS}
    assert found.value("tenure_grants_total", node="/n0") == 1


async def test_nodes_that_a_reader_may_not_see_are_not_named() -> None:
    authenticator = tokens(reader={"/": "read", "/secret": "none"})
    async with hosted(authenticator=authenticator) as server:
        for path in ("/secret", "/public"):
            server.context.meter.node(path).granted += 3
        found = await ask(server.address, "/metrics", token=READER)
        assert b"secret" not in found.body
        assert found.value("tenure_grants_total", node="/public") == 3
        assert found.value("tenure_grants_total", node=OTHERS) == 3


async def test_hostile_names_of_nodes_are_escaped() -> None:
    path = '/a"}\\ 1\n<script>é'
    async with hosted() as server:
        server.context.meter.node(path).granted += 1
        found = await ask(server.address, "/metrics")
        assert found.value("tenure_grants_total", node=path) == 1


async def test_scrapes_share_a_text_for_a_moment(clock: Clock) -> None:
    async with hosted() as server:
        exposition: Exposition = server.http.service._exposition
        everything = Permissions.parse(None)
        first = await exposition.text(everything)
        assert await exposition.text(everything) is first
        assert await exposition.text(Permissions.parse({"/": "read"})) is not first
