"""HTTP/2 frames as they arrive: where slices end, and what a client may not send too much of."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes
from hypothesis import given
from hypothesis import strategies as st

from tenure.server.ydb.http2 import CONTROL_BURST, CONTROL_RATE, BadFrame, FrameScanner
from tests.hostile.target import H2_PREFACE, h2_frame

CALLS = {1}
DATA = h2_frame(0, 0, 1, b"x")
MESSAGE = h2_frame(0, 0, 1, bytes(5))
END = h2_frame(0, 1, 1)
HEADERS = h2_frame(1, 4, 1, b"x" * 20)
CONTROL = {
    "data for a stream without a call": h2_frame(0, 0, 3, b"x"),
    "an end of a stream without a call": h2_frame(0, 1, 3),
    "empty data": h2_frame(0, 0, 1),
    "padded data": h2_frame(0, 8, 1, b"\x03\x00\x00\x00"),
    "priority": h2_frame(2, 0, 1, bytes(5)),
    "reset": h2_frame(3, 0, 1, bytes(4)),
    "settings": h2_frame(4, 0, 0),
    "ping": h2_frame(6, 0, 0, bytes(8)),
    "an answer to no ping": h2_frame(6, 1, 0, bytes(8)),
    "window update": h2_frame(8, 0, 0, b"\x00\x00\x00\x01"),
    "an unknown frame": h2_frame(77, 0, 0),
}


class Clock:
    seconds = 5.0

    def __call__(self) -> float:
        return self.seconds


def scanner(clock: Clock | None = None, *, greeted: bool = True) -> FrameScanner:
    """A scanner that has seen the preface."""
    made = FrameScanner(clock or Clock(), CALLS)
    assert made.cut(H2_PREFACE, 0) == len(H2_PREFACE)
    if greeted:
        made.greeted()
    return made


def slices(made: FrameScanner, data: bytes) -> list[bytes]:
    """All slices of what arrives in one piece."""
    found, at = [], 0
    while at < len(data):
        ends = made.cut(data, at)
        assert ends > at
        found.append(data[at:ends])
        at = ends
    return found


def test_a_slice_has_a_few_frames() -> None:
    assert [len(each) // len(DATA) for each in slices(scanner(), DATA * 100)] == [8] * 12 + [4]


def test_a_slice_ends_with_a_call() -> None:
    assert slices(scanner(), (HEADERS + END) * 3) == [HEADERS, END + HEADERS, END + HEADERS, END]


@given(st.lists(st.integers(1, 40)))
def test_frames_are_found_however_they_are_cut(sizes: list[int]) -> None:
    data = H2_PREFACE + (HEADERS + DATA * 3 + END) * 5
    made, got, at = FrameScanner(Clock(), CALLS), b"", 0
    for size in [*sizes, len(data)]:
        piece, at = data[at : at + size], at + size
        got += b"".join(slices(made, piece))
    assert got == data
    with pytest.raises(BadFrame, match="a frame of 16385 bytes"):
        made.cut(b"\x00\x40\x01" + bytes(6), 0)


@pytest.mark.parametrize("kind", CONTROL)
def test_control_frames_have_a_rate(kind: str) -> None:
    clock = Clock()
    made = scanner(clock)
    slices(made, CONTROL[kind] * CONTROL_BURST)
    clock.seconds += 2.0
    slices(made, CONTROL[kind] * 2 * CONTROL_RATE)
    with pytest.raises(BadFrame, match="control frames") as caught:
        made.cut(CONTROL[kind], 0)
    assert caught.value.code is ErrorCodes.ENHANCE_YOUR_CALM


def test_a_stranger_has_a_small_burst_and_the_same_rate() -> None:
    clock = Clock()
    made = scanner(clock, greeted=False)
    slices(made, CONTROL["ping"] * 32)
    clock.seconds += 100.0
    slices(made, CONTROL["ping"] * 32)
    with pytest.raises(BadFrame, match="more than 32 control frames"):
        made.cut(CONTROL["ping"], 0)


def test_a_piece_of_a_message_allows_no_control_frame() -> None:
    made = scanner()
    for _ in range(CONTROL_BURST):
        slices(made, DATA * 20 + CONTROL["window update"])
    with pytest.raises(BadFrame, match="control frames"):
        slices(made, DATA * 20 + CONTROL["window update"])


def test_a_client_may_acknowledge_what_it_gets() -> None:
    made = scanner()
    for _ in range(10_000):
        made.answered()
        slices(made, CONTROL["window update"] * 2)


def test_a_client_may_acknowledge_each_answer_to_what_it_sends() -> None:
    made = scanner()
    for _ in range(1000):  # many answers come in one frame
        slices(made, MESSAGE * 20)
        made.answered()
        slices(made, CONTROL["window update"] * 20)


def test_messages_and_ends_have_no_rate() -> None:
    slices(scanner(), (DATA + END) * 10 * CONTROL_BURST)


@pytest.mark.parametrize("size", [0, 16384])
def test_a_header_block_does_not_go_on_for_ever(size: int) -> None:
    made = scanner()
    made.cut(h2_frame(1, 0, 1), 0)
    with pytest.raises(BadFrame, match="header block"):
        slices(made, h2_frame(9, 0, 1, bytes(size)) * 9)


def test_one_frame_has_a_few_settings() -> None:
    slices(scanner(), h2_frame(4, 0, 0, bytes(6 * 32)))
    with pytest.raises(BadFrame, match="settings of"):
        scanner().cut(h2_frame(4, 0, 0, bytes(6 * 33)), 0)
