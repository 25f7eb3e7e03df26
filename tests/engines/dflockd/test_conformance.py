"""The engine keeps the contract, as far as dflockd's protocol goes.

It cannot tell who owns and who waits, nor has it data or watches, so that most behaviours cannot be
seen; what is left is asked here, and the same in other words in `test_engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tenure.testing.conformance import BEHAVIOURS, Conformance, Stores, conformance_tests
from tests.engines.dflockd.servers import InThread, early_server

_LONG = 150  # seconds of silence: the suite's windows are long, and nobody renews


@contextmanager
def on_our_server() -> Iterator[str]:
    with InThread(read_timeout=_LONG) as server:
        yield f"{server.url}?read-timeout={_LONG}"


@contextmanager
def on_an_early_server() -> Iterator[str]:
    with early_server("--read-timeout", f"{_LONG}") as server:
        yield f"{server.url}?read-timeout={_LONG}"


SEEN = {
    "a_grant_is_reported_only_to_its_session",
    "a_program_that_closes_its_session_gets_no_end",
    "a_refused_request_leaves_its_session_in_good_order",
    "a_renewal_may_come_from_any_thread_while_the_loop_stands_still",
    "a_renewal_proves_the_session_from_the_time_it_was_sent",
    "a_session_closes_although_its_caller_is_cancelled",
    "a_session_that_holds_nothing_expires_too",
    "an_engine_has_a_url_a_clock_and_capabilities",
    "attaching_proves_the_session",
    "closing_a_session_on_one_connection_leaves_its_neighbours_alone",
    "operations_take_effect_in_the_order_in_which_they_were_called",
    "refused_and_withdrawn_requests_leave_the_order_rising",
    "the_default_node_cannot_be_dropped_even_by_force",
    "the_default_node_is_always_there",
    "a_request_may_be_withdrawn_at_once_after_it_was_sent",
}
"""The behaviours that can be seen, at least in their greater part."""

assert set(BEHAVIOURS) > SEEN
TestOurs: type[Conformance] = conformance_tests(Stores(on_our_server))
for _name in set(BEHAVIOURS) - SEEN:
    setattr(TestOurs, f"test_{_name}", None)

TestEarly: type[Conformance] = conformance_tests(Stores(on_an_early_server))
for _name in set(BEHAVIOURS) - {  # a process for each: those that tell something of this engine
    "a_grant_is_reported_only_to_its_session",
    "a_renewal_may_come_from_any_thread_while_the_loop_stands_still",
    "closing_a_session_on_one_connection_leaves_its_neighbours_alone",
}:
    setattr(TestEarly, f"test_{_name}", None)
