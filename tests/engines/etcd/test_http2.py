"""HTTP/2 as the engine speaks it: against another implementation, and against broken peers."""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import h2.events
import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from tenure.engines.etcd.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Fields,
    Http2Connection,
    Http2Stream,
    Trouble,
    frame,
    head,
)

HEAD = head("/a/Method", "host:1", secure=False, more=[("te", "trailers"), ("token", "t" * 200)])
OK = b"\x88"  # the block of ":status: 200", by the static table
MIB = 1 << 20


class Asked(Http2Stream):
    """A request, and all that it was told."""

    def __init__(self, data: bytes = b"", *, ends: bool = True, block: bytes = HEAD) -> None:
        super().__init__(block, data, ends=ends)
        self.heard: list[tuple[str, object, bool]] = []

    def received_headers(self, fields: Fields, ended: bool) -> None:
        self.heard.append(("headers", dict(fields), ended))

    def received_data(self, data: bytes, ended: bool) -> None:
        self.heard.append(("data", data, ended))

    def lost(self, why: str, *, again: bool) -> None:
        self.heard.append(("lost", why, again))

    @property
    def body(self) -> bytes:
        return b"".join(data for what, data, _ in self.heard if isinstance(data, bytes))

    @property
    def again(self) -> bool:
        """Whether it was lost, and may be made again."""
        ((what, _, again),) = self.heard
        assert what == "lost"
        return again


class Peer:
    """Our side, and the other: another implementation, which is strict."""

    def __init__(self, **settings: int) -> None:
        self.spoke = 0
        self.ours = Http2Connection(self._speak)
        self.theirs = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.theirs.initiate_connection()
        self.theirs.update_settings({SettingCodes[name]: value for name, value in settings.items()})
        self.heard: list[h2.events.Event] = []
        self.talk()

    def _speak(self) -> None:
        self.spoke += 1

    def talk(self, piece: int = 1 << 30) -> None:
        """Carry bytes both ways until nobody has anything to say."""
        while True:
            ours, theirs = self.ours.take(), self.theirs.data_to_send()
            if not (ours or theirs):
                return
            if ours:
                for event in self.theirs.receive_data(ours):
                    self.heard.append(event)
                    if isinstance(event, h2.events.DataReceived):
                        self.theirs.acknowledge_received_data(
                            event.flow_controlled_length, event.stream_id
                        )
            for at in range(0, len(theirs), piece):
                self.ours.receive(theirs[at : at + piece])

    def ask(self, *args: bytes, ends: bool = True) -> Asked:
        asked = Asked(*args, ends=ends)
        self.ours.begin(asked)
        self.talk()
        return asked

    def of(self, kind: type[h2.events.Event]) -> list[h2.events.Event]:
        return [each for each in self.heard if isinstance(each, kind)]

    def requests(self) -> list[int]:
        return [
            each.stream_id for each in self.heard if isinstance(each, h2.events.RequestReceived)
        ]

    def answer(self, number: int, *data: bytes) -> None:
        self.theirs.send_headers(number, [(":status", "200"), ("content-type", "grpc")])
        for each in data:
            self.theirs.send_data(number, each)
        self.theirs.send_headers(number, [("grpc-status", "0")], end_stream=True)


ANSWERED = [
    ("headers", {b":status": b"200", b"content-type": b"grpc"}, False),
    ("data", b"yes", False),
    ("headers", {b"grpc-status": b"0"}, True),
]


def test_a_request_arrives_as_it_was_meant() -> None:
    peer = Peer()
    peer.ask(b"what")
    (request,) = peer.of(h2.events.RequestReceived)
    assert isinstance(request, h2.events.RequestReceived)
    assert [(bytes(name), bytes(value)) for name, value in request.headers] == [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/a/Method"),
        (b":authority", b"host:1"),
        (b"te", b"trailers"),
        (b"token", b"t" * 200),
    ]
    (data,) = peer.of(h2.events.DataReceived)
    assert isinstance(data, h2.events.DataReceived)
    assert data.data == b"what"
    assert len(peer.of(h2.events.StreamEnded)) == 1


@given(st.integers(1, 40))
def test_an_answer_is_understood_however_it_is_cut(piece: int) -> None:
    peer = Peer()
    asked = peer.ask(b"what")
    peer.answer(1, b"yes")
    peer.talk(piece)
    assert asked.heard == ANSWERED
    assert not peer.ours.streams


def test_answers_go_to_who_asked_in_any_order() -> None:
    peer = Peer()
    asked = [peer.ask() for _ in range(3)]
    for number in (5, 1, 3):
        peer.answer(number, b"%d" % number)
    peer.talk()
    assert [each.body for each in asked] == [b"1", b"3", b"5"]


def test_both_sides_talk_and_the_peer_may_end_first() -> None:
    peer = Peer()
    asked = peer.ask(b"one", ends=False)
    asked.send(b"two")
    peer.talk()
    assert [each.data for each in peer.of(h2.events.DataReceived)] == [b"one", b"two"]  # type: ignore[attr-defined]
    peer.answer(1, b"yes")
    peer.talk()
    assert asked.heard == ANSWERED
    assert len(peer.of(h2.events.StreamReset)) == 1  # it need not wait for the rest
    asked.send(b"three")
    asked.reset(Trouble.CANCEL)
    assert not peer.ours.take()


@pytest.mark.parametrize("window", [1, 1000, 65_535])
def test_what_is_large_goes_as_the_windows_allow(window: int) -> None:
    size = 200_000 if window > 1 else 300
    peer = Peer(INITIAL_WINDOW_SIZE=window)
    asked = [peer.ask(bytes([n]) * size) for n in range(2)]
    for number, each in enumerate(asked):
        received = b"".join(
            event.data  # type: ignore[attr-defined]
            for event in peer.of(h2.events.DataReceived)
            if event.stream_id == each.number  # type: ignore[attr-defined]
        )
        assert received == bytes([number]) * size
        assert not each.pending


def test_a_window_that_shrinks_is_waited_for_and_one_that_grows_is_used() -> None:
    peer = Peer(INITIAL_WINDOW_SIZE=10)
    ours, theirs = peer.ours, peer.theirs
    asked = Asked(b"x" * 30)
    ours.begin(asked)
    theirs.receive_data(ours.take())
    for window, left in ((5, 20), (10, 20), (15, 15), (40, 0)):
        ours.receive(frame(SETTINGS, 0, 0, struct.pack(">HL", 4, window)))
        assert len(asked.pending) == left


def test_a_large_answer_is_let_in() -> None:
    peer = Peer()
    asked = peer.ask()
    theirs = peer.theirs
    theirs.send_headers(1, [(":status", "200")])
    left = 20 * MIB
    while left:
        some = min(theirs.local_flow_control_window(1), theirs.max_outbound_frame_size, left)
        assert some
        theirs.send_data(1, bytes(some), end_stream=some == left)
        left -= some
        peer.talk()
    assert len(asked.body) == 20 * MIB
    assert asked.heard[-1][2]


def test_only_as_many_as_are_allowed_are_open() -> None:
    peer = Peer(MAX_CONCURRENT_STREAMS=1)
    first, second, unwanted, third = (peer.ask() for _ in range(4))
    assert peer.requests() == [1]
    unwanted.reset(Trouble.CANCEL)
    second.send(b"more")
    peer.answer(1)
    peer.talk()
    assert peer.requests() == [1, 3]
    peer.theirs.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
    peer.talk()
    assert peer.requests() == [1, 3, 5]
    assert [bool(each.heard) for each in (first, second, unwanted, third)] == [True] + 3 * [False]


def test_a_long_head_is_continued() -> None:
    peer = Peer()
    block = head("/a", "host", secure=True, more=[("token", "t" * 40_000)])
    peer.ours.begin(Asked(block=block))
    peer.talk()
    (request,) = peer.of(h2.events.RequestReceived)
    assert dict(request.headers)[b"token"] == b"t" * 40_000  # type: ignore[attr-defined]


def test_who_is_not_wanted_any_more_hears_nothing_and_the_others_do() -> None:
    peer = Peer()
    unwanted, other = peer.ask(), peer.ask()
    peer.theirs.send_headers(1, [(":status", "200")])
    peer.answer(3, b"yes")
    unwanted.reset(Trouble.CANCEL)
    unwanted.reset(Trouble.CANCEL)
    peer.talk()
    assert unwanted.heard == []
    assert other.heard == ANSWERED
    (reset,) = peer.of(h2.events.StreamReset)
    assert (reset.stream_id, reset.error_code) == (1, ErrorCodes.CANCEL)  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", [ErrorCodes.REFUSED_STREAM, ErrorCodes.INTERNAL_ERROR])
def test_a_request_that_the_peer_resets_is_lost_and_perhaps_surely_not_done(
    code: ErrorCodes,
) -> None:
    peer = Peer()
    asked = peer.ask()
    peer.theirs.reset_stream(1, code)
    peer.talk()
    assert asked.again is (code == ErrorCodes.REFUSED_STREAM)
    assert code.name in str(asked.heard)


def test_a_peer_that_leaves_finishes_what_it_has_begun() -> None:
    peer = Peer(MAX_CONCURRENT_STREAMS=2)
    first, second, third = peer.ask(), peer.ask(), peer.ask()
    peer.ours.receive(
        frame(GOAWAY, 0, 0, struct.pack(">LL", 1, Trouble.ENHANCE_YOUR_CALM) + b"pings")
    )
    assert peer.ours.draining
    assert second.again
    assert third.again
    assert "(ENHANCE_YOUR_CALM: pings)" in str(second.heard)
    peer.answer(1, b"yes")
    peer.talk()
    assert first.heard == ANSWERED
    assert not peer.ours.streams


def test_what_is_open_when_the_connection_ends_may_have_been_done() -> None:
    peer = Peer(MAX_CONCURRENT_STREAMS=1)
    first, second = peer.ask(), peer.ask()
    for _ in range(2):
        peer.ours.fail("the cable")
    assert (first.again, second.again) == (False, True)
    peer.ours.receive(b"what comes afterwards")
    assert peer.ours.over == "the cable"


def test_when_the_numbers_are_used_up_another_connection_is_needed() -> None:
    peer = Peer(MAX_CONCURRENT_STREAMS=2)
    peer.ours._next = (1 << 31) - 1
    last = Asked(b"last")
    peer.ours.begin(last)
    assert peer.ours.draining
    assert last.number == (1 << 31) - 1
    assert not last.heard


def test_a_sign_of_life_is_given_and_asked_for() -> None:
    peer = Peer()
    for word in (b"12345678", b"abcdefgh"):
        peer.theirs.ping(word)
    peer.ours.ping()
    peer.talk()
    assert len(peer.of(h2.events.PingReceived)) == 1
    for _ in range(2):
        peer.ours.pong()
        peer.talk()
    answered = peer.of(h2.events.PingAckReceived)
    assert [each.ping_data for each in answered] == [b"12345678", b"abcdefgh"]  # type: ignore[attr-defined]


def test_who_writes_is_told_once_until_it_is_taken() -> None:
    peer = Peer()
    before = peer.spoke
    for _ in range(3):
        peer.ours.begin(Asked(b"x"))
    assert peer.spoke == before + 1
    assert peer.ours.take()
    peer.ours.ping()
    assert peer.spoke == before + 2


# What another implementation would not say


def connected() -> tuple[Http2Connection, Asked]:
    """With a request under way, and nothing to be written."""
    ours, asked = Http2Connection(lambda: None), Asked(b"x")
    ours.receive(frame(SETTINGS, 0, 0))
    ours.begin(asked)
    ours.take()
    return ours, asked


def test_padding_priorities_and_what_is_unknown_are_passed_over() -> None:
    ours, asked = connected()
    for said in (
        frame(0xFA, 0xFF, 77, b"a kind from the future"),
        frame(2, 0, 1, bytes(5)),
        frame(SETTINGS, 0, 0, struct.pack(">HLHL", 0xAAAA, 1, 6, 1)),
        frame(SETTINGS, ACK, 0),
        frame(PING, ACK, 0, bytes(8)),
        frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, b"\x03" + bytes(5) + OK + bytes(3)),
        frame(DATA, PADDED, 1, b"\x02yes\0\0"),
        frame(DATA, PADDED | END_STREAM, 1, b"\x00"),
    ):
        ours.receive(said)
    assert asked.heard == [
        ("headers", {b":status": b"200"}, False),
        ("data", b"yes", False),
        ("data", b"", True),
    ]
    assert not ours.over


def test_a_header_block_may_come_in_many_pieces() -> None:
    ours, asked = connected()
    block = OK + b"\x00\x01a\x01b" + b"\x40\x01c\x01d"
    for at in range(len(block)):
        kind, flags = (HEADERS, END_STREAM) if at == 0 else (CONTINUATION, 0)
        flags |= END_HEADERS if at == len(block) - 1 else 0
        ours.receive(frame(kind, flags, 1, block[at : at + 1]))
    assert asked.heard == [("headers", {b":status": b"200", b"a": b"b", b"c": b"d"}, True)]


def test_blocks_without_number_are_forgotten_again() -> None:
    ours, _ = connected()
    asked = [Asked() for _ in range(600)]
    for number, each in enumerate(asked):
        ours.begin(each)
        block = OK + b"\x00\x01a\x04%04d" % number
        ours.receive(frame(HEADERS, END_HEADERS | END_STREAM, each.number, block))
    assert [each.heard[0][1] for each in asked] == [
        {b":status": b"200", b"a": b"%04d" % number} for number in range(600)
    ]


def test_what_is_late_for_a_request_that_is_over_is_passed_over() -> None:
    ours, asked = connected()
    asked.reset(Trouble.CANCEL)
    for said in (
        frame(HEADERS, END_HEADERS, 1, OK),
        frame(DATA, 0, 1, b"late"),
        frame(WINDOW_UPDATE, 0, 1, struct.pack(">L", 5)),
        frame(RST_STREAM, 0, 1, struct.pack(">L", 8)),
    ):
        ours.receive(said)
    assert not ours.over
    assert not asked.heard


def number(value: int) -> bytes:
    return struct.pack(">L", value)


VIOLATIONS = {
    "data on a stream that is not": (frame(DATA, 0, 3, b"x"), "PROTOCOL_ERROR"),
    "data on all streams": (frame(DATA, 0, 0, b"x"), "PROTOCOL_ERROR"),
    "headers on a stream of the peer's": (frame(HEADERS, END_HEADERS, 2, OK), "PROTOCOL_ERROR"),
    "a reset of what is not": (frame(RST_STREAM, 0, 3, number(8)), "PROTOCOL_ERROR"),
    "a short reset": (frame(RST_STREAM, 0, 1, b"x"), "FRAME_SIZE_ERROR"),
    "settings of a stream": (frame(SETTINGS, 0, 1), "PROTOCOL_ERROR"),
    "settings cut off": (frame(SETTINGS, 0, 0, b"12345"), "FRAME_SIZE_ERROR"),
    "settings in an answer": (frame(SETTINGS, ACK, 0, bytes(6)), "FRAME_SIZE_ERROR"),
    "a window beyond all bounds": (
        frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1 << 31)),
        "FLOW_CONTROL_ERROR",
    ),
    "frames too small": (frame(SETTINGS, 0, 0, struct.pack(">HL", 5, 100)), "PROTOCOL_ERROR"),
    "a promise": (frame(5, END_HEADERS, 1, number(2) + OK), "PROTOCOL_ERROR"),
    "a ping of a stream": (frame(PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "a short ping": (frame(PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "an end of a stream": (frame(GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "a short end": (frame(GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "no window": (frame(WINDOW_UPDATE, 0, 0, number(0)), "FLOW_CONTROL_ERROR"),
    "no window for a stream": (frame(WINDOW_UPDATE, 0, 1, number(0)), "FLOW_CONTROL_ERROR"),
    "too much window": (frame(WINDOW_UPDATE, 0, 0, number((1 << 31) - 1)), "FLOW_CONTROL_ERROR"),
    "too much window for a stream": (
        frame(WINDOW_UPDATE, 0, 1, number((1 << 31) - 1)),
        "FLOW_CONTROL_ERROR",
    ),
    "padding without end": (frame(DATA, PADDED, 1, b"\x05abc"), "PROTOCOL_ERROR"),
    "padding of nothing": (frame(DATA, PADDED, 1), "PROTOCOL_ERROR"),
    "headers too short": (frame(HEADERS, END_HEADERS | PRIORITY, 1, b"abc"), "FRAME_SIZE_ERROR"),
    "a block that is not continued": (
        frame(HEADERS, 0, 1, OK) + frame(PING, 0, 0, bytes(8)),
        "PROTOCOL_ERROR",
    ),
    "a block of nobody continued": (frame(CONTINUATION, END_HEADERS, 1, OK), "PROTOCOL_ERROR"),
    "a block of another continued": (
        frame(HEADERS, 0, 1, OK) + frame(CONTINUATION, END_HEADERS, 3, OK),
        "PROTOCOL_ERROR",
    ),
    "a block without end": (
        frame(HEADERS, 0, 1, OK) + 20 * frame(CONTINUATION, 0, 1, bytes(1 << 14)),
        "ENHANCE_YOUR_CALM",
    ),
    "a block of nothing": (frame(HEADERS, END_HEADERS, 1, b"\xff\xff"), "COMPRESSION_ERROR"),
    "a table that there is not": (frame(HEADERS, END_HEADERS, 1, b"\xbe"), "COMPRESSION_ERROR"),
    "a frame too large": (frame(DATA, 0, 1, bytes((1 << 14) + 1)), "FRAME_SIZE_ERROR"),
}


@pytest.mark.parametrize("said", VIOLATIONS)
def test_a_peer_that_breaks_the_rules_is_left_with_a_reason(said: str) -> None:
    ours, asked = connected()
    what, code = VIOLATIONS[said]
    ours.receive(what)
    assert ours.over.startswith("the peer violated HTTP/2: ")
    assert not asked.again
    told = ours.take()
    assert told[3] == GOAWAY
    assert Trouble(int.from_bytes(told[13:17], "big")).name == code


def test_more_data_than_was_allowed_ends_the_connection() -> None:
    ours, asked = connected()
    ours.receive(frame(HEADERS, END_HEADERS, 1, OK))
    asked.room = 10  # as if nothing had been told to go on
    ours.receive(frame(DATA, 0, 1, bytes(11)))
    assert "more data" in ours.over


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(PING, 0, 0, bytes(8))])
def test_who_does_not_begin_with_settings_speaks_something_else(said: bytes) -> None:
    ours = Http2Connection(lambda: None)
    ours.receive(said)
    assert "does not begin with its settings" in ours.over


FRAMES = st.builds(
    frame,
    st.integers(0, 10),
    st.integers(0, 255),
    st.integers(0, 5),
    st.one_of(st.binary(max_size=30), st.sampled_from([OK, bytes(4), number(1), number(1 << 20)])),
)


@given(st.lists(st.one_of(FRAMES, st.binary(max_size=40))), st.integers(1, 50))
def test_no_bytes_break_more_than_the_connection(said: list[bytes], piece: int) -> None:
    ours, asked = connected()
    everything = b"".join(said)
    for at in range(0, len(everything), piece):
        ours.receive(everything[at : at + piece])
    ours.fail("the end")
    losses = [what for what, *_ in asked.heard if what == "lost"]
    ended = any(ended for what, _, ended in asked.heard if what != "lost")
    assert len(losses) == (0 if ended else 1)
    assert losses == [what for what, *_ in asked.heard[-1:] if what == "lost"]
