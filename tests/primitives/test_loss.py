"""What a loss does beside being raised."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import NoReturn

import pytest

from tenure._client.loss import LOSS_EXIT_STATUS, carry_out, check_policy, lost_error
from tenure.errors import InvalidArgument, LeaseLost, SessionExpired
from tests.primitives.helpers import World

LOSS = LeaseLost("the lease of 'x' is lost", node="/jobs", name="x")


def test_a_policy_is_cancel_exit_or_a_callable() -> None:
    for policy in (None, "cancel", "exit", print):
        check_policy(policy)
    for wrong in ("kill", 5):
        with pytest.raises(InvalidArgument, match="'cancel', 'exit' or a callable"):
            check_policy(wrong)  # type: ignore[arg-type]


def test_cancel_leaves_it_to_the_block() -> None:
    carry_out("cancel", LOSS)


def test_a_callable_is_given_the_loss() -> None:
    told: list[LeaseLost] = []
    carry_out(told.append, LOSS)
    assert told == [LOSS]


@pytest.mark.parametrize("error", [ValueError("oops"), SystemExit(3), KeyboardInterrupt()])
def test_a_callable_that_fails_is_logged_and_hinders_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_loss: LeaseLost) -> NoReturn:
        raise error

    with caplog.at_level(logging.ERROR, logger="tenure"):
        carry_out(fail, LOSS)
    assert caplog.messages == ["the on_loss callback failed: node=/jobs name='x'"]
    assert caplog.records[0].exc_info is not None


class Gone(BaseException):
    pass


def test_exit_says_why_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(status: int) -> NoReturn:
        raise Gone(status)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Gone) as gone:
        carry_out("exit", LOSS)
    assert gone.value.args == (LOSS_EXIT_STATUS,)
    assert capfd.readouterr().err == "tenure: the lease of 'x' is lost; this process ends\n"


def test_exit_ends_the_process_even_with_nowhere_to_say_why() -> None:
    code = (
        "import os; os.close(2)\n"
        "from tenure.errors import LeaseLost; from tenure._client.loss import carry_out\n"
        "try: carry_out('exit', LeaseLost('gone'))\n"
        "finally: os._exit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == LOSS_EXIT_STATUS


async def test_a_loss_says_what_is_lost_where_and_why_and_what_to_do(world: World) -> None:
    async with world.client() as client:
        lease = await client.mutex("m").lock()
        cause = SessionExpired("over")
        loss = lost_error(lease._request, "the session is over", cause)
        assert str(loss) == (
            "the lease of 'm' on /default is lost: the session is over; stop what it protects: "
            "another program may hold it already"
        )
        assert (loss.node, loss.name, loss.fencing_token) == ("/default", "m", lease.fencing_token)
        assert loss.__cause__ is cause
