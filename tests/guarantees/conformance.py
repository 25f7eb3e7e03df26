"""What the behaviours of the conformance suite show, on each engine that passes them."""

from __future__ import annotations

from collections.abc import Callable

from tenure.testing.conformance import BEHAVIOURS, Conformance, Stores, conformance_tests
from tests.guarantees.vocabulary import INAPPLICABLE, YDB, Engine, Fault, Promise, guarantee

SHOWN: dict[Fault, dict[str, tuple[Promise, ...]]] = {
    "none": {
        "the_lock_is_never_in_two_hands": ("one owner",),
        "two_requests_of_one_session_are_two_requests": ("one owner",),
        "what_is_owned_is_never_taken_back": ("one owner",),
        "grants_are_handed_out_in_the_order_of_the_queue": ("in order",),
        "nobody_goes_past_a_request_that_waits": ("in order",),
        "a_request_that_does_not_wait_never_goes_past_one_that_does": ("in order",),
        "order_ids_rise_over_semaphores_nodes_sessions_and_connections": ("tokens rise",),
        "an_order_id_is_never_used_again": ("tokens rise",),
        "who_comes_second_waits_and_is_granted_after_the_release": ("others proceed",),
        "one_release_grants_all_that_fit": ("others proceed",),
        "an_ephemeral_semaphore_goes_with_its_last_request": ("nothing leaks",),
        "a_closed_session_leaves_all_its_queues_in_one_step": ("nothing leaks",),
    },
    "stalled": {"a_renewal_may_come_from_any_thread_while_the_loop_stands_still": ("kept",)},
    "cancelled": {
        "a_request_whose_answer_was_never_seen_can_be_withdrawn": ("nothing leaks",),
        "a_withdrawal_that_crosses_its_grant_leaks_nothing": ("nothing leaks",),
        "a_cancelled_attach_leaves_no_session_behind": ("nothing leaks",),
        "a_session_closes_although_its_caller_is_cancelled": ("nothing leaks",),
        "a_waiter_that_leaves_makes_way_for_those_behind_it": ("others proceed",),
        "a_cancelled_take_over_leaves_the_session_to_the_next": ("kept",),
    },
    "cut off": {
        "a_session_that_is_not_renewed_expires_and_the_next_is_granted": ("others proceed",),
        "a_waiter_expires_with_its_session_and_those_behind_it_move_up": ("others proceed",),
        "an_expired_session_leaves_all_its_queues_in_one_step": ("nothing leaks",),
        "a_renewal_of_a_session_that_is_over_proves_nothing_and_does_not_raise": ("loss reported",),
    },
    "restarted": {
        "what_lasts_outlives_the_last_connection": ("answers stand",),
        "a_detached_session_expires_although_nobody_is_left_to_see_it": ("nothing leaks",),
    },
    "wall clock": {
        "order_ids_rise_although_the_wall_clock_is_set_back": ("tokens rise",),
        "a_wall_clock_that_jumps_ends_no_session": ("kept",),
    },
    "administrator": {
        "an_ended_session_is_notified_and_the_next_is_granted": (
            "loss reported",
            "others proceed",
        ),
        "a_session_ended_by_an_administrator_leaves_all_its_queues_in_one_step": ("nothing leaks",),
        "an_evicted_owner_is_notified_and_the_next_is_granted": ("loss reported", "others proceed"),
        "an_evicted_waiter_is_notified_and_passed_over": ("loss reported", "in order"),
        "deleting_by_force_notifies_owners_and_waiters": ("loss reported",),
        "a_waiter_for_more_than_the_limit_is_removed_and_those_behind_go_on": (
            "loss reported",
            "others proceed",
        ),
        "a_higher_limit_lets_no_waiter_pass_another": ("in order",),
        "an_evicted_request_is_missing_at_its_release": ("loss reported",),
        "what_was_deleted_by_force_was_not_there": ("loss reported",),
        "a_node_dropped_by_force_ends_its_sessions_as_expired": ("loss reported",),
        "a_semaphore_that_is_created_again_knows_nothing_of_the_old_one": ("nothing leaks",),
    },
    "taken over": {
        "of_two_attachments_the_earlier_one_is_ended": ("loss reported",),
        "a_takeover_is_complete_when_the_former_program_is_notified": (
            "one owner",
            "loss reported",
        ),
        "who_takes_over_in_turn_is_cut_off_in_turn": ("one owner",),
        "of_many_that_take_over_at_once_one_has_the_session": ("one owner",),
        "a_resumed_session_finds_every_request_in_its_place": ("in order",),
    },
}


def conformance_of(engine: Engine, stores: Stores) -> type[Conformance]:
    """The suite on one engine, its tests marked with what they show there."""
    suite = conformance_tests(stores)
    for fault, shown in SHOWN.items():
        for name, promises in shown.items():
            needs = BEHAVIOURS[name].needs
            cannot = ("virtual" in needs and not stores.virtual) or (
                "resize" in needs and engine == YDB
            )
            if (engine, fault) in INAPPLICABLE or cannot:
                continue
            place = f"{BEHAVIOURS[name].play.__module__.replace('.', '/')}.py::{name}"
            test = _of_its_own(getattr(suite, f"test_{name}"))
            mark = guarantee(fault, *promises, on=engine, place=f"src/{place}")
            setattr(suite, f"test_{name}", mark(test))
    return suite


def _of_its_own(shared: Callable[[Conformance], None]) -> Callable[[Conformance], None]:
    """The same test, for marks that are not those of the other engines."""

    def test(self: Conformance) -> None:
        shared(self)

    test.__name__, test.__qualname__, test.__doc__ = (
        shared.__name__,
        shared.__qualname__,
        shared.__doc__,
    )
    return test
