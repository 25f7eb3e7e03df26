"""Admission: which connections come in, by source, by identity and by how many there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.server.admission import LOCAL, Admission, Source, fitted, source_at
from tenure.server.auth.identity import ANONYMOUS, Identity
from tenure.server.limits import NO_LIMIT, Count, LimitReached, Limits
from tenure.testing import VirtualClock

ALICE, BOB = Identity("alice", "token"), Identity("bob", "token")


class Waiting:
    """A greeting that knows whether it was displaced."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.displaced = False

    def displace(self, error: LimitReached) -> None:
        assert error.limit == "greetings"
        assert not self.displaced
        self.displaced = True


class Place:
    """An admission with its counts."""

    def __init__(self, **limits: float) -> None:
        chosen = Limits(**limits)  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self.connections = Count("connections", chosen.connections)
        self.greetings = Count("greetings", chosen.greetings)
        self.admission = Admission(chosen, self.connections, self.greetings, self.clock)

    def greet(self, host: str, *, local: bool = False) -> Waiting:
        pending = Waiting(Source(host, local=True) if local else source_at(host))
        self.admission.greet(pending)
        return pending

    def let_in(
        self,
        host: str,
        identity: Identity = ANONYMOUS,
        *,
        local: bool = False,
        returning: bool = False,
    ) -> None:
        source = Source(host, local=True) if local else source_at(host)
        self.admission.let_in(source, identity, returning=returning)

    def fill(self, host: str, identity: Identity = ANONYMOUS) -> None:
        for _ in range(self.connections.most - self.connections.taken):
            self.let_in(host, identity)


# Sources


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("memory", "memory"),
    ],
)
def test_a_source_is_an_ipv4_address_or_an_ipv6_network_of_64_bits(host: str, name: str) -> None:
    assert source_at(host) == Source(name)


# Greetings


def test_the_greediest_source_displaces_its_own_oldest_greeting() -> None:
    place = Place(greetings=4)
    quiet = place.greet("192.0.2.1")
    greedy = [place.greet("192.0.2.9") for _ in range(10)]
    assert not quiet.displaced
    assert [each.displaced for each in greedy] == [True] * 7 + [False] * 3
    assert place.greetings.taken == 4


def test_a_quiet_source_displaces_the_greediest_ones_oldest_greeting() -> None:
    place = Place(greetings=3)
    greedy = [place.greet("192.0.2.9") for _ in range(3)]
    quiet = place.greet("192.0.2.1")
    assert not quiet.displaced
    assert [each.displaced for each in greedy] == [True, False, False]


def test_among_equal_sources_the_first_one_yields() -> None:
    place = Place(greetings=2)
    pendings = [place.greet(f"192.0.2.{number}") for number in range(4)]
    assert [each.displaced for each in pendings] == [True, True, False, False]


def test_addresses_of_one_ipv6_network_are_one_source() -> None:
    place = Place(greetings=3)
    quiet = [place.greet("192.0.2.1"), place.greet("192.0.2.1")]
    for number in range(10):
        place.greet(f"2001:db8::{number:x}")
    assert [each.displaced for each in quiet] == [True, False]  # one each, in the end


def test_greetings_of_unix_sockets_are_apart_from_the_networks() -> None:
    place = Place(greetings=2)
    local = place.greet("uid 0", local=True)
    remote = [place.greet("192.0.2.9") for _ in range(10)]
    assert not local.displaced
    for _ in range(LOCAL):
        place.greet("uid 1000", local=True)
    assert not local.displaced
    assert sum(not each.displaced for each in remote) == 2


def test_as_many_may_greet_through_unix_sockets_as_over_the_network() -> None:
    place = Place(greetings=500)
    local = [place.greet("uid 1000", local=True) for _ in range(500)]
    assert not any(each.displaced for each in local)


def test_a_greeting_that_is_over_makes_room() -> None:
    place = Place(greetings=2)
    first, second = place.greet("192.0.2.1"), place.greet("192.0.2.1")
    place.admission.stop_greeting(first)
    third = place.greet("192.0.2.1")
    assert [second.displaced, third.displaced] == [False, False]


def test_a_shortage_displaces_remote_greetings_before_local_ones() -> None:
    place = Place()
    local, remote = place.greet("uid 0", local=True), place.greet("192.0.2.1")
    assert place.admission.make_room()
    assert (remote.displaced, local.displaced) == (True, False)
    assert place.admission.make_room()
    assert local.displaced
    assert not place.admission.make_room()


@given(st.data())
def test_the_one_that_yields_is_always_of_a_source_with_the_most(data: st.DataObject) -> None:
    place = Place(greetings=5)
    present: list[Waiting] = []
    for _ in range(data.draw(st.integers(1, 40))):
        over = data.draw(st.booleans())
        if present and over:
            pending = present.pop(data.draw(st.integers(0, len(present) - 1)))
            place.admission.stop_greeting(pending)
        else:
            present.append(place.greet(f"192.0.2.{data.draw(st.integers(1, 3))}"))
        gone = [each for each in present if each.displaced]
        for each in gone:
            most = max(
                sum(other.source == source for other in present)
                for source in {other.source for other in present}
            )
            own = [other for other in present if other.source == each.source]
            assert len(own) == most
            assert own[0] is each
            present.remove(each)
        assert place.greetings.taken == len(present) <= 5


# Connections


def test_a_full_server_has_slots_for_sources_with_few_connections() -> None:
    place = Place(connections=200)
    place.fill("192.0.2.9")
    with pytest.raises(LimitReached, match="connections = 200"):
        place.let_in("192.0.2.9")
    place.let_in("192.0.2.1")
    place.let_in("192.0.2.1")
    with pytest.raises(LimitReached):  # it has not few any more
        place.let_in("192.0.2.1")


def test_the_reserved_slots_are_limited() -> None:
    place = Place(connections=200)
    place.fill("192.0.2.9")
    for number in range(25):
        place.let_in(f"198.51.100.{number}")
    with pytest.raises(LimitReached):
        place.let_in("198.51.100.99")


def test_an_identity_with_many_connections_has_no_reserved_slots_at_other_addresses() -> None:
    place = Place(connections=200)
    place.fill("192.0.2.9", ALICE)
    with pytest.raises(LimitReached):
        place.let_in("192.0.2.1", ALICE)
    place.let_in("192.0.2.1", BOB)


def test_a_full_server_has_slots_for_unix_sockets_and_returning_programs() -> None:
    place = Place(connections=1)
    place.fill("192.0.2.9")
    for _ in range(LOCAL):
        place.let_in("uid 1000", local=True)
    with pytest.raises(LimitReached):
        place.let_in("uid 1000", local=True)
    place.let_in("192.0.2.9", returning=True)


@pytest.mark.parametrize(("host", "identity"), [("192.0.2.1", BOB), ("192.0.2.2", ALICE)])
def test_connections_of_one_source_or_identity_are_limited(host: str, identity: Identity) -> None:
    place = Place(connections_per_source=2)
    place.let_in("192.0.2.1", ALICE)
    place.let_in("192.0.2.1", ALICE)
    with pytest.raises(LimitReached) as caught:
        place.let_in(host, identity)
    assert caught.value.limit == "connections_per_source"
    place.let_in("192.0.2.2", BOB)
    place.admission.leave(source_at("192.0.2.1"), ALICE)
    place.let_in(host, identity)


# Rates


def test_a_source_may_open_max_connections_at_once_and_then_so_many_a_second() -> None:
    place = Place(connections=10, connections_per_second=2)
    fast, slow = source_at("192.0.2.9"), source_at("192.0.2.1")
    for _ in range(10):
        place.admission.arrive(fast)
    with pytest.raises(LimitReached, match="connections_per_second = 2"):
        place.admission.arrive(fast)
    place.admission.arrive(slow)
    place.clock.advance(1.0)
    place.admission.arrive(fast)
    place.admission.arrive(fast)
    with pytest.raises(LimitReached):
        place.admission.arrive(fast)


def test_the_machines_own_addresses_have_no_rate() -> None:
    place = Place(connections=1, connections_per_second=1)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"):
        for _ in range(10):
            place.admission.arrive(source_at(host))


def test_an_identity_has_a_rate_of_its_own() -> None:
    place = Place(connections=2, connections_per_second=1)
    for number in range(2):
        place.let_in(f"192.0.2.{number}", ALICE)
        place.admission.leave(source_at(f"192.0.2.{number}"), ALICE)
    with pytest.raises(LimitReached, match="alice opens connections faster"):
        place.let_in("192.0.2.7", ALICE)
    place.let_in("192.0.2.7", ALICE, returning=True)
    place.let_in("192.0.2.7", BOB)


def test_rates_of_sources_that_are_gone_are_forgotten() -> None:
    place = Place(connections=1, connections_per_second=1)
    for low, high in itertools.product(range(200), range(50)):
        place.clock.advance(0.01)
        place.admission.arrive(source_at(f"10.0.{high}.{low}"))
    assert len(place.admission._rates._due) <= 4200


# Open files


def test_limits_fit_the_open_files() -> None:
    assert fitted(Limits(), 65536) == Limits()
    for files in (64, 256, 1024, 4096):
        limits = fitted(Limits(connections=NO_LIMIT, greetings=NO_LIMIT), files)
        used = limits.connections + max(1, limits.connections // 8) + 2 * limits.greetings
        assert used <= max(files - 64 - 2 * LOCAL, 16)
    assert fitted(Limits(), 1024).greetings == 138
