"""What an answer to a withdrawal means, whichever server gives it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tenure.engines.contract import Withdrawn
from tenure.engines.native.calls import NativeCall
from tenure.engines.native.reconnector import NativeReconnector, dispatch
from tenure.errors import EngineError, SessionExpired
from tenure.wire.messages import Done, Withdraw


def withdrawal(*, may_have_run: bool) -> NativeCall:
    call = NativeCall(1, Withdraw(1, 1, 7), asyncio.get_running_loop().create_future())
    call.may_have_run = may_have_run
    return call


def outcome(call: NativeCall, answer: Done) -> Withdrawn:
    calls = {call.rid: call}
    connection: Any = SimpleNamespace(calls=calls, answered=calls.pop)
    unused: Any = pytest.fail
    dispatch({}, connection, unused, unused)[Done](answer)
    found = call.future.result()
    assert isinstance(found, Withdrawn)
    return found


@pytest.mark.parametrize("found", [True, False])
async def test_the_server_says_whether_the_request_was_there(found: bool) -> None:
    expected = Withdrawn.LEFT if found else Withdrawn.MISSING
    assert outcome(withdrawal(may_have_run=False), Done(1, found)) is expected


async def test_a_server_that_does_not_say_it_is_taken_to_have_released() -> None:
    assert outcome(withdrawal(may_have_run=False), Done(1)) is Withdrawn.LEFT


@pytest.mark.parametrize("found", [True, False])
async def test_what_a_lost_server_may_have_done_was_there(found: bool) -> None:
    assert outcome(withdrawal(may_have_run=True), Done(1, found)) is Withdrawn.LEFT


async def test_a_session_that_is_over_was_so_before_unless_a_lost_server_may_have_done_it() -> None:
    reconnector = object.__new__(NativeReconnector)
    reconnector.fail(unsure := withdrawal(may_have_run=True), SessionExpired("over"))
    assert unsure.future.result() is Withdrawn.LEFT
    for may_have_run, error in ((False, SessionExpired("over")), (True, EngineError("a fault"))):
        reconnector.fail(call := withdrawal(may_have_run=may_have_run), error)
        assert call.future.exception() is error
