"""Messages: what is said is understood, and what makes no sense is an error, whatever it is.

Run as ``FUZZ=50 pytest tests/wire/test_messages.py`` it tries 200,000 random inputs, in a minute.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import DecodeError, Struct

from tenure.wire import messages as wire
from tenure.wire.frames import FrameReader, FrameWriter
from tenure.wire.values import Number

MORE = int(os.environ.get("FUZZ", "1"))
"""How many times as many inputs as usual."""

INPUTS = 50
"""How many are made of each example of Hypothesis, whose examples are dear."""

CLIENT: tuple[type[Struct], ...] = get_args(wire.ClientMessage)
SERVER: tuple[type[Struct], ...] = get_args(wire.ServerMessage)
DECODERS: list[msgspec.msgpack.Decoder[Any]] = [wire.client_message(), wire.server_message()]
UNREADABLE = (DecodeError, RecursionError, UnicodeDecodeError)
"""What a decoder raises; both ends take it for the end of the conversation."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)


@st.composite
def almost_messages(draw: st.DrawFn, kinds: tuple[type[Struct], ...]) -> bytes:
    """The number of a message, and values that may be what its fields hold."""
    kind = draw(st.sampled_from(kinds))
    fields: list[Any] = draw(st.lists(values, max_size=len(kind.__struct_fields__) + 2))
    return msgspec.msgpack.encode([kind.__struct_config__.tag, *fields])


def damaged(whole: bytes, random: Random) -> bytes:
    """What has been right, and of which something is not: cheap, for there are many of them."""
    at = random.randrange(len(whole) + 1)
    match random.randrange(5):
        case 0:
            return whole[:at]
        case 1:
            return whole[:at] + random.randbytes(1) + whole[at + 1 :]
        case 2:
            return whole[:at] + random.randbytes(random.randrange(1, 9)) + whole[at:]
        case 3:
            return whole[:at] + whole[random.randrange(len(whole) + 1) :]
        case _:
            return whole + random.randbytes(random.randrange(1, 10))


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Whatever a field may have."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Number:
        return st.integers(0, 2**63 - 1)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(of_type(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(of_type, inner))
    if inner:
        return st.one_of(*map(of_type, inner))
    if issubclass(hint, Struct):
        return of_class(hint)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        float: st.floats(allow_nan=False),
        int: st.integers(-(2**63), 2**64 - 1),
        str: st.text(max_size=10),
        type(None): st.none(),
    }
    return simple[hint]


def of_class(kind: type[Struct]) -> st.SearchStrategy[Any]:
    """Any message of that kind."""
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: of_type(hints[name]) for name in kind.__struct_fields__})


def decoder_for(kind: type[Struct]) -> msgspec.msgpack.Decoder[Any]:
    return DECODERS[0] if kind in CLIENT else DECODERS[1]


def decode(raw: bytes) -> None:
    for decoder in DECODERS:
        try:
            message = decoder.decode(raw)
        except UNREADABLE:
            continue
        assert isinstance(message, Struct)


seeds = st.integers(0, 2**64 - 1).map(Random)


@settings(max_examples=20 * MORE, deadline=None)
@given(seeds)
def test_random_bytes_are_a_message_or_an_error(random: Random) -> None:
    for _ in range(INPUTS):
        decode(random.randbytes(random.randrange(200)))


@settings(max_examples=60 * MORE, deadline=None)
@given(almost_messages(CLIENT + SERVER), seeds)
def test_a_damaged_message_is_a_message_or_an_error(whole: bytes, random: Random) -> None:
    decode(whole)
    for _ in range(INPUTS - 1):
        decode(damaged(whole, random))


@pytest.mark.parametrize("opening", [b"\x91", b"\xdd\x00\x00\x00\x01", b"\x81\xc0"])
def test_deep_nesting_is_an_error(opening: bytes) -> None:
    for decoder, tag in zip(DECODERS, (b"\x93\x01", b"\x93\x01"), strict=True):
        with pytest.raises(UNREADABLE):
            decoder.decode(tag + opening * 200_000 + b"\xc0")


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_what_announces_more_than_it_has_is_an_error_and_takes_no_memory(header: bytes) -> None:
    for decoder in DECODERS:
        for tag in range(30):
            with pytest.raises(UNREADABLE):
                decoder.decode(bytes([0x93, tag, 0x01]) + header)


@pytest.mark.parametrize("kinds", [CLIENT, SERVER], ids=["client", "server"])
def test_no_two_messages_of_one_direction_have_one_number(kinds: tuple[type[Struct], ...]) -> None:
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", CLIENT + SERVER, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_is_said_is_understood(kind: type[Struct], data: st.DataObject) -> None:
    message = data.draw(of_class(kind))
    writer = FrameWriter(1 << 20)
    writer.add(message)
    (frame,) = FrameReader(1 << 20).feed(writer.take())
    assert decoder_for(kind).decode(frame) == message


@pytest.mark.parametrize("kind", CLIENT + SERVER, ids=lambda kind: kind.__name__)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_an_end_passes_over_fields_that_it_does_not_know(
    kind: type[Struct], data: st.DataObject
) -> None:
    message = data.draw(of_class(kind))
    raw: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    more = msgspec.msgpack.encode([*raw, "from the future", [1, 2, {"a": None}]])
    assert decoder_for(kind).decode(more) == message


def test_numbers_that_no_store_can_keep_are_refused() -> None:
    for number in (-1, 2**63, 2**64 - 1):
        raw = msgspec.msgpack.encode([10, 1, 1, number])
        with pytest.raises(DecodeError):
            DECODERS[0].decode(raw)
