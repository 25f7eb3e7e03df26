"""Frames: cut anywhere, put together again; what is too long is an error before it is kept."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError

from tenure.wire.frames import HEADER_BYTES, BadFrame, FrameReader, FrameWriter
from tenure.wire.messages import Enqueue, Ping, client_message

LARGEST = 100


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def read(reader: FrameReader, stream: bytes, cuts: list[int]) -> tuple[list[bytes], str]:
    """The frames of a stream that arrives in pieces, and what was wrong at the end."""
    ends = [*sorted({min(cut, len(stream)) for cut in cuts}), len(stream)]
    found: list[bytes] = []
    begin = 0
    try:
        for end in ends:
            found.extend(map(bytes, reader.feed(stream[begin:end])))
            begin = end
    except BadFrame as error:
        return found, str(error)
    return found, ""


bodies = st.lists(st.binary(max_size=LARGEST), max_size=8)
cuts = st.lists(st.integers(0, 1000), max_size=12)


@given(bodies, cuts)
def test_whatever_the_pieces_the_frames_are_those_that_were_sent(
    sent: list[bytes], where: list[int]
) -> None:
    reader = FrameReader(LARGEST)
    assert read(reader, b"".join(map(frame, sent)), where) == (sent, "")
    assert reader.kept == 0


@given(bodies, st.binary(max_size=HEADER_BYTES - 1), cuts)
def test_what_has_not_arrived_whole_is_kept_and_not_given(
    sent: list[bytes], beginning: bytes, where: list[int]
) -> None:
    reader = FrameReader(LARGEST)
    assert read(reader, b"".join(map(frame, sent)) + beginning, where) == (sent, "")
    assert reader.kept == len(beginning)


@given(bodies, st.integers(LARGEST + 1, 2**32 - 1), st.binary(max_size=50), cuts)
def test_a_frame_that_is_too_long_is_an_error_behind_those_before_it(
    sent: list[bytes], announced: int, more: bytes, where: list[int]
) -> None:
    stream = b"".join(map(frame, sent)) + struct.pack(">I", announced) + more
    found, error = read(FrameReader(LARGEST), stream, where)
    assert found == sent
    assert str(announced) in error


@given(st.lists(st.binary(max_size=200), max_size=20), st.integers(1, LARGEST))
def test_random_bytes_never_make_a_reader_keep_more_than_one_frame(
    pieces: list[bytes], largest: int
) -> None:
    reader = FrameReader(largest)
    for piece in pieces:
        try:
            frames = list(reader.feed(piece))
        except BadFrame:
            return
        assert all(len(each) <= largest for each in frames)
        assert reader.kept < HEADER_BYTES + largest


def test_the_longest_frame_may_be_changed_between_two() -> None:
    reader = FrameReader(2)
    found = []
    for each in reader.feed(frame(b"ab") + frame(b"abcd")):
        found.append(bytes(each))
        reader.largest = 4
    assert found == [b"ab", b"abcd"]


def test_what_is_written_is_read() -> None:
    writer = FrameWriter(1000)
    asked = Enqueue(1, 2, 3, "m", 2**64 - 1, b"data", 1.5, ephemeral=True)
    taken = writer.add(asked) + writer.add(Ping())
    assert len(writer) == taken
    decode = client_message().decode
    stream = writer.take()
    assert len(stream) == taken
    assert len(writer) == 0
    assert [decode(each) for each in FrameReader(1000).feed(stream)] == [asked, Ping()]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Enqueue(1, 2, 3, "m" * 200, 1, b"", None, ephemeral=True), BadFrame),
        (Enqueue(1, 2, 3, "\ud800", 1, b"", None, ephemeral=True), UnicodeEncodeError),
        (Enqueue(1, 2, 3, "m", 2**64, b"", None, ephemeral=True), OverflowError),
    ],
)
def test_what_cannot_be_sent_leaves_the_rest_alone(
    message: Enqueue, error: type[Exception]
) -> None:
    writer = FrameWriter(LARGEST)
    writer.add(Ping())
    with pytest.raises(error):
        writer.add(message)
    writer.add(Ping())
    assert len(list(FrameReader(LARGEST).feed(writer.take()))) == 2


def test_a_bad_frame_is_an_error_of_decoding() -> None:
    assert issubclass(BadFrame, DecodeError)
