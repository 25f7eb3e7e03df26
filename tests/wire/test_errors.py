"""Errors on their way: of the same class, with the same facts, and never with a secret."""

from __future__ import annotations

import pytest

from tenure import errors
from tenure.errors import (
    EngineError,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)
from tenure.server.limits import LimitReached
from tenure.wire.errors import WireError, from_wire, to_wire

RAISED_BY_ENGINES = (
    *("AuthenticationFailed", "EngineError", "EngineUnavailable", "InvalidArgument"),
    *("LeaseReleased", "NodeBusy", "NodeExists", "NodeNotFound", "SemaphoreBusy"),
    *("SemaphoreExists", "SemaphoreNotFound", "SessionClosed", "SessionExpired", "Unsupported"),
)


@pytest.mark.parametrize("name", RAISED_BY_ENGINES)
def test_what_an_engine_raises_arrives_as_what_it_is(name: str) -> None:
    kind: type[TenureError] = getattr(errors, name)
    sent = kind("what happened", node="/n", name="m")
    arrived = from_wire(to_wire(sent))
    assert type(arrived) is kind
    assert (str(arrived), arrived.node, arrived.name) == ("what happened", "/n", "m")


def test_that_a_session_was_taken_over_arrives_with_its_end() -> None:
    for taken_over in (False, True):
        arrived = from_wire(to_wire(SessionExpired("it is over", taken_over=taken_over)))
        assert isinstance(arrived, SessionExpired)
        assert arrived.taken_over == taken_over


@pytest.mark.parametrize("limit", [None, 3, 2**64 - 1])
def test_the_facts_of_an_error_arrive_with_it(limit: int | None) -> None:
    arrived = from_wire(to_wire(SemaphoreExists("it exists", limit=limit)))
    assert isinstance(arrived, SemaphoreExists)
    assert arrived.limit == limit


class Special(SemaphoreNotFound):
    """An engine's own kind of a known error."""


def test_a_kind_of_a_known_error_arrives_as_that() -> None:
    assert type(from_wire(to_wire(Special("no", name="m")))) is SemaphoreNotFound
    assert type(from_wire(to_wire(LimitReached("full", "sessions")))) is EngineError


def test_a_class_that_a_client_does_not_know_is_a_failure_of_the_store() -> None:
    arrived = from_wire(WireError("FromTheFuture", "what happened", "/n"))
    assert type(arrived) is EngineError
    assert str(arrived) == "what happened"


def test_the_text_of_a_defect_is_not_sent() -> None:
    for defect in (RuntimeError("secret"), KeyError("secret"), errors.Misuse("secret")):
        sent = to_wire(defect)
        assert sent.kind == "EngineError"
        assert "secret" not in sent.message
