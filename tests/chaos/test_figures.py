from chaos.figures import ENOUGH, LATEST, Figures, Spread, measure
from chaos.work import MUTEXES
from tenure.testing.history import (
    Continued,
    Crashed,
    Gone,
    Granted,
    History,
    Leaves,
    Paused,
    Record,
    Requested,
    Revokes,
    Takes,
    Took,
)


def asked(at: float, process: str, number: int, name: str = MUTEXES[0]) -> Requested:
    return Requested(at, process, f"{process}-{number}", "/n", name, 1, 1, 2.0)


def figures(
    *records: Record, until: float = 10.0, faults: tuple[tuple[str, float, float, bool], ...] = ()
) -> Figures:
    return measure(History(records), 0.0, until, faults)


def test_a_kill_is_taken_over_when_somebody_who_waited_is_told() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.1, "p-1", 1, 9.0),
        asked(0.2, "q", 1),
        Crashed(1.0, "p"),
        Granted(1.25, "q-1", 2, 9.0),
    )

    assert told.taken_over == Spread(1, 0.25, 0.25, 0.25)


HELD = (asked(0.0, "p", 1), Granted(0.1, "p-1", 1, 9.0), asked(0.2, "q", 1))


def test_a_stop_is_taken_over_when_somebody_who_waited_is_told() -> None:
    told = figures(
        *HELD, Paused(1.0, "p"), Granted(3.5, "q-1", 2, 9.0), Continued(4.0, "p"), until=60.0
    )

    assert told.from_stopped == Spread(1, 2.5, 2.5, 2.5)
    assert told.taken_over is None
    assert not told.too_late


def test_what_a_dead_process_holds_is_passed_on_in_time() -> None:
    late = 1.0 + LATEST + 0.5
    granted = figures(*HELD, Crashed(1.0, "p"), Granted(late, "q-1", 2, 90.0), until=60.0)
    never = figures(*HELD, Crashed(1.0, "p"), until=60.0)
    stopped = figures(*HELD, Paused(1.0, "p"), Continued(50.0, "p"), until=60.0)

    assert "its holder p was killed" in granted.too_late[0]
    assert "59.0 s" in never.too_late[0]
    assert "49.0 s after its holder p was stopped" in stopped.too_late[0]


def test_only_a_store_out_of_order_excuses_a_late_handover() -> None:
    outages = (("kill-server", 2.0, 20.0, True), ("cut", 15.0, 45.0, True))
    kills = (("kill", 2.0, 45.0, True), ("kill-server", 2.0, 45.0, False))

    assert not figures(*HELD, Crashed(1.0, "p"), until=60.0, faults=outages).too_late
    assert figures(*HELD, Crashed(1.0, "p"), until=60.0, faults=kills).too_late


def test_a_name_is_late_only_while_a_process_that_goes_on_waits_for_it() -> None:
    leaves = (Leaves(2.0, "q-1"), Gone(2.1, "q-1", "released"))
    assert not figures(*HELD, Crashed(1.0, "p"), *leaves, until=60.0).too_late
    assert not figures(*HELD, Crashed(1.0, "p"), Paused(2.0, "q"), until=60.0).too_late
    again = (*leaves, asked(55.0, "q", 2))
    assert not figures(*HELD, Crashed(1.0, "p"), *again, until=60.0).too_late


def test_who_asks_after_the_kill_takes_nothing_over() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.1, "p-1", 1, 9.0),
        Crashed(1.0, "p"),
        asked(3.0, "q", 1),
        Granted(3.1, "q-1", 2, 9.0),
    )

    assert told.taken_over is None


def test_a_kill_of_one_who_holds_nothing_is_taken_over_by_nobody() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.1, "p-1", 1, 9.0),
        Leaves(0.2, "p-1"),
        Gone(0.3, "p-1", "released"),
        asked(0.4, "q", 1),
        Crashed(1.0, "p"),
        Granted(1.25, "q-1", 2, 9.0),
    )

    assert told.taken_over is None


def test_a_loss_is_noticed_so_long_after_the_deadline() -> None:
    told = figures(
        asked(0.0, "p", 1), Granted(0.1, "p-1", 1, 2.0), Gone(2.25, "p-1", "lost", deadline=2.0)
    )

    assert told.noticed == Spread(1, 0.25, 0.25, 0.25)
    assert told.losses == 1


def test_who_was_stopped_notices_from_its_going_on() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.1, "p-1", 1, 2.0),
        Paused(1.0, "p"),
        Continued(5.0, "p"),
        Gone(5.125, "p-1", "lost", deadline=2.0),
    )

    assert told.noticed == Spread(1, 0.125, 0.125, 0.125)


def test_what_an_administrator_takes_is_noticed_from_his_act() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.1, "p-1", 1, 9.0),
        Revokes(1.0, request="p-1"),
        Gone(1.5, "p-1", "lost", deadline=9.0),
    )

    assert told.noticed == Spread(1, 0.5, 0.5, 0.5)


def test_unavailable_is_what_is_waited_for_and_not_granted() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.5, "p-1", 1, 9.0),
        asked(1.0, "q", 1),
        Leaves(4.0, "p-1"),
        Gone(4.0, "p-1", "released"),
        Granted(4.5, "q-1", 2, 9.0),
        faults=(("stop", 2.0, 3.0, True), ("lock", 2.0, 3.0, False), ("fill", 5.0, 6.0, True)),
    )

    assert told.unavailable is not None
    assert told.unavailable.seconds == 3.5
    assert told.unavailable.since == 1.0
    assert told.unavailable.name == MUTEXES[0]
    assert told.unavailable.during == ("stop",)
    assert told.faults == {"stop": 1, "fill": 1}
    assert told.missed == {"lock": 1}


def test_a_name_that_nobody_waits_for_is_not_unavailable() -> None:
    told = figures(
        asked(0.0, "p", 1),
        Granted(0.5, "p-1", 1, 9.0),
        asked(1.0, "q", 1),
        Gone(1.25, "q-1", "timeout"),
        asked(9.0, "q", 2),
        Granted(9.125, "q-2", 2, 9.5),
    )

    assert told.unavailable is not None
    assert told.unavailable.seconds == 0.5


def test_what_a_killed_process_waited_for_is_not_waited_for_any_more() -> None:
    told = figures(asked(1.0, "q", 1), Crashed(1.5, "q"))

    assert told.unavailable is not None
    assert told.unavailable.seconds == 0.5


def test_who_still_waits_at_the_end_has_waited_until_then() -> None:
    told = figures(asked(1.0, "q", 1), until=8.0)

    assert told.unavailable is not None
    assert told.unavailable.seconds == 7.0


def test_the_rate_is_of_acquisitions_in_the_time_of_the_faults() -> None:
    records = [asked(-1.0, "p", 1), asked(1.0, "p", 2), asked(2.0, "p", 3)]
    grants = [Granted(each.at + 0.1, each.request, None, 9.0) for each in records]

    told = figures(*records, *grants, until=4.0)

    assert told.acquisitions == 2
    assert told.rate == 0.5 < ENOUGH


def test_a_share_is_one_acquisition_and_a_take_is_none() -> None:
    of_key = Requested(0.0, "p", "p-1/key", "/n", "shared/key/a", 1, 2, 2.0)
    told = figures(
        of_key,
        Requested(0.0, "p", "p-1", "/n", "shared", 1, 5, 2.0, key="p-1/key"),
        Granted(1.0, "p-1/key", 1, 9.0),
        Granted(1.0, "p-1", 2, 9.0),
        Takes(2.0, "p", "p-2", "/n", "rate", 1, 10, 1_000_000, 10),
        Took(2.1, "p-2", 7),
        Takes(2.2, "p", "p-3", "/n", "rate", 1, 10, 1_000_000, 10),
        Took(2.3, "p-3"),
    )

    assert (told.requests, told.acquisitions, told.takes) == (1, 1, 1)
    assert told.operations == 2
