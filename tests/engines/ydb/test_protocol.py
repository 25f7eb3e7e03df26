"""The conversation about one session, by hand-made messages: no server, no event loop."""

from __future__ import annotations

import pytest

from tenure.engines.ydb import messages
from tenure.engines.ydb.protocol import YdbProtocol
from tenure.wire.ydb import Message, SessionResponse, Status

Response = SessionResponse
WINDOW = 30.0


class Talk:
    """A protocol, what it says, and what it tells."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.told: list[object] = []
        self.protocol = YdbProtocol("/local/n", WINDOW, "me", b"key", lambda: self.time, self)

    # YdbProtocolEvents

    def outgoing(self) -> None:
        assert self.protocol.outgoing

    def started(self) -> None:
        self.told.append("started")

    def proven(self, at: float) -> None:
        self.told.append(at)

    def refused(self, failure: Message) -> None:
        self.told.append(("refused", Status(failure.status).name))

    def ended(self, failure: Message | None) -> None:
        self.told.append(("ended", failure and Status(failure.status).name))

    # The server

    def says(self, **what: Message) -> None:
        self.protocol.receive(Response(**what))

    def attach(self, session_id: int = 7) -> Message:
        """A stream, with SessionStarted; returns what the server was told."""
        first = self.protocol.begin().session_start
        self.says(session_started=Response.SessionStarted(session_id=session_id))
        return first

    def fails(self, status: Status) -> None:
        self.says(failure=Response.Failure(status=status))

    def said(self) -> list[str]:
        """What kinds of messages were said since the last time."""
        said = [message.WhichOneof("request") for message in self.protocol.outgoing]
        self.protocol.outgoing.clear()
        return said

    def heard(self, since: int = 0) -> list[object]:
        return self.told[since:]

    @property
    def last(self) -> object:
        return self.told[-1]


def ask_for(talk: Talk, name: str) -> list[tuple[str, int]]:
    """Ask for a lock; returns what is answered, as it comes."""
    answers: list[tuple[str, int]] = []

    def heard(kind: str, body: Message) -> bool:
        answers.append((kind, body.req_id))
        return kind != "acquire_semaphore_pending"

    talk.protocol.send(
        lambda req_id: messages.acquire(req_id, name, 1, b"", None, ephemeral=True), heard
    )
    return answers


def test_the_first_message_attaches_and_a_later_one_attaches_again() -> None:
    talk = Talk()
    first = talk.attach()
    assert (first.path, first.session_id, first.timeout_millis) == ("/local/n", 0, 30_000)
    assert (first.description, first.seq_no, first.protection_key) == ("me", 1, b"key")
    assert talk.heard() == [1000.0, "started"]
    talk.protocol.lost()
    talk.time = 1005.0
    again = talk.attach()
    assert (again.session_id, again.seq_no, again.protection_key) == (7, 2, b"key")
    assert talk.heard(2) == [1005.0, "started"]


def test_what_is_asked_before_attaching_is_sent_with_it() -> None:
    talk = Talk()
    ask_for(talk, "a")
    assert talk.said() == []
    talk.attach()
    assert talk.said() == ["acquire_semaphore"]


def test_what_is_not_finished_is_asked_again_in_its_order_after_a_loss() -> None:
    talk = Talk()
    talk.attach()
    waiting, finished, unanswered = (ask_for(talk, name) for name in "abc")
    talk.says(acquire_semaphore_pending=Response.AcquireSemaphorePending(req_id=1))
    talk.says(acquire_semaphore_result=Response.AcquireSemaphoreResult(req_id=2, acquired=True))
    talk.protocol.lost()
    assert talk.said() == []
    talk.attach()
    again = [message.acquire_semaphore.name for message in talk.protocol.outgoing]
    assert again == ["a", "c"]
    talk.says(acquire_semaphore_result=Response.AcquireSemaphoreResult(req_id=1, acquired=True))
    talk.says(acquire_semaphore_result=Response.AcquireSemaphoreResult(req_id=3, acquired=True))
    assert [kind for kind, _ in waiting] == [
        "acquire_semaphore_pending",
        "acquire_semaphore_result",
    ]
    assert len(finished) == len(unanswered) == 1


def test_what_was_dropped_is_neither_answered_nor_asked_again() -> None:
    talk = Talk()
    talk.attach()
    answers: list[str] = []

    def heard(kind: str, _: Message) -> bool:
        answers.append(kind)
        return True

    asked = talk.protocol.send(lambda req_id: messages.release(req_id, "a"), heard)
    talk.said()
    talk.protocol.drop(asked)
    talk.says(release_semaphore_result=Response.ReleaseSemaphoreResult(req_id=asked.req_id))
    talk.protocol.lost()
    talk.attach()
    assert (talk.said(), answers) == ([], [])


def test_who_asks_knows_whether_it_was_asked_before() -> None:
    talk = Talk()
    asked = talk.protocol.send(lambda req_id: messages.release(req_id, "a"), lambda *_: True)
    talk.attach()
    assert not asked.repeated
    talk.protocol.lost()
    talk.attach()
    assert asked.repeated


def _renewed(talk: Talk) -> tuple[int, int]:
    """Ask for a proof; returns what the two answers have to carry."""
    talk.protocol.renew()
    ping, described = talk.protocol.outgoing[-2:]
    talk.protocol.outgoing.clear()
    return ping.ping.opaque, described.describe_semaphore.req_id


@pytest.mark.parametrize("pong_first", [True, False])
def test_a_proof_takes_the_answers_to_a_ping_and_to_a_description(pong_first: bool) -> None:
    talk = Talk()
    talk.attach()
    known = len(talk.told)
    talk.time = 1010.0
    opaque, req_id = _renewed(talk)
    talk.time = 1012.0
    answers = [
        {"pong": Response.PingPong(opaque=opaque)},
        {
            "describe_semaphore_result": Response.DescribeSemaphoreResult(
                req_id=req_id, status=Status.NOT_FOUND
            )
        },
    ]
    first, second = answers if pong_first else reversed(answers)
    talk.says(**first)
    assert talk.heard(known) == []
    talk.says(**second)
    assert talk.heard(known) == [1010.0]
    assert not talk.protocol.awaits_proof


def test_a_description_that_failed_proves_nothing() -> None:
    talk = Talk()
    talk.attach()
    known = len(talk.told)
    opaque, req_id = _renewed(talk)
    talk.says(pong=Response.PingPong(opaque=opaque))
    talk.says(
        describe_semaphore_result=Response.DescribeSemaphoreResult(
            req_id=req_id, status=Status.BAD_SESSION
        )
    )
    assert talk.heard(known) == []
    assert talk.protocol.awaits_proof
    opaque, req_id = _renewed(talk)  # the next one does, and the first is forgotten
    talk.says(pong=Response.PingPong(opaque=opaque))
    talk.says(
        describe_semaphore_result=Response.DescribeSemaphoreResult(
            req_id=req_id, status=Status.SUCCESS
        )
    )
    assert talk.heard(known) == [1000.0]
    assert not talk.protocol.awaits_proof


def test_answers_from_before_a_loss_prove_nothing_after_it() -> None:
    talk = Talk()
    talk.attach()
    opaque, req_id = _renewed(talk)
    talk.protocol.lost()
    talk.attach()
    known = len(talk.told)
    talk.says(pong=Response.PingPong(opaque=opaque))
    talk.says(
        describe_semaphore_result=Response.DescribeSemaphoreResult(
            req_id=req_id, status=Status.NOT_FOUND
        )
    )
    assert talk.heard(known) == []


def test_a_server_that_answers_nothing_is_not_asked_for_ever() -> None:
    talk = Talk()
    talk.attach()
    for _ in range(100):
        talk.protocol.renew()
    assert len(talk.said()) == 8


def test_pings_are_answered_while_the_program_is_heard_of() -> None:
    talk = Talk()
    talk.attach()
    talk.time += WINDOW - 0.1
    talk.says(ping=Response.PingPong(opaque=5))
    assert [message.pong.opaque for message in talk.protocol.outgoing] == [5]
    talk.said()
    talk.time += 0.2
    talk.says(ping=Response.PingPong(opaque=6))
    assert talk.said() == []
    talk.protocol.renew()
    talk.said()
    talk.says(ping=Response.PingPong(opaque=7))
    assert talk.said() == ["pong"]


def test_who_is_silent_attaches_no_more_but_to_end_the_session() -> None:
    talk = Talk()
    talk.attach()
    talk.protocol.lost()
    wanted = [talk.protocol.may_attach]
    talk.time += WINDOW + 0.1
    wanted.append(talk.protocol.may_attach)
    talk.protocol.stop()
    wanted.append(talk.protocol.may_attach)
    assert wanted == [True, False, True]
    talk.attach()
    assert talk.said() == ["session_stop"]


@pytest.mark.parametrize("status", [Status.SESSION_EXPIRED, Status.BAD_SESSION])
@pytest.mark.parametrize("while_attached", [True, False])
def test_only_two_statuses_end_a_session(status: Status, while_attached: bool) -> None:
    talk = Talk()
    talk.attach()
    if not while_attached:
        talk.protocol.lost()
        talk.protocol.begin()
    talk.fails(status)
    assert talk.last == ("ended", status.name)
    known = len(talk.told)
    talk.says(session_started=Response.SessionStarted(session_id=7))
    talk.fails(status)
    assert talk.heard(known) == []


@pytest.mark.parametrize("status", [status for status in Status if 400_010 <= status <= 400_200])
def test_whatever_else_a_server_fails_with_may_pass(status: Status) -> None:
    if status in {Status.SESSION_EXPIRED, Status.BAD_SESSION}:
        return
    talk = Talk()
    talk.attach()
    waiting = ask_for(talk, "a")
    talk.fails(status)
    refused: object = ("refused", status.name)
    assert talk.last == refused
    talk.protocol.lost()
    talk.said()
    talk.attach()
    assert talk.heard()[-1] == "started"
    assert talk.said() == ["acquire_semaphore"]
    assert waiting == []


def test_before_the_first_attachment_no_status_ends_anything() -> None:
    talk = Talk()
    talk.protocol.begin()
    talk.fails(Status.SESSION_EXPIRED)
    assert talk.told == [("refused", "SESSION_EXPIRED")]


def test_a_stop_is_said_at_once_or_after_attaching_and_nothing_else_then() -> None:
    talk = Talk()
    talk.protocol.stop()
    ask_for(talk, "a")
    talk.attach()
    assert talk.said() == ["session_stop"]
    talk.says(ping=Response.PingPong(opaque=5))
    talk.protocol.renew()
    talk.protocol.stop()
    assert talk.said() == []
    talk.says(session_stopped=Response.SessionStopped(session_id=7))
    assert talk.told == [("ended", None)]


def test_what_is_not_understood_is_left_alone() -> None:
    talk = Talk()
    talk.attach()
    known = len(talk.told)
    talk.protocol.receive(Response())
    talk.says(describe_semaphore_changed=Response.DescribeSemaphoreChanged(req_id=99))
    talk.says(acquire_semaphore_result=Response.AcquireSemaphoreResult(req_id=99))
    talk.says(pong=Response.PingPong(opaque=99))
    assert talk.heard(known) == []
    assert talk.said() == []
