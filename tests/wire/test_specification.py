"""The specification of the native protocol names every message and value, as the code has them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import Struct
from msgspec.structs import fields

from tenure.wire import values
from tenure.wire.errors import WireError
from tenure.wire.frames import FrameWriter
from tenure.wire.messages import FEATURES, ClientMessage, Hello, ServerMessage

PAGE = (Path(__file__).parents[2] / "docs/reference/native-protocol.md").read_text()


def rows(heading: str) -> list[tuple[str, ...]]:
    """The cells of the table below a heading, without its own head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def described(type_: type[Any]) -> str:
    return ", ".join(field.name for field in fields(type_))


@pytest.mark.parametrize(
    ("heading", "union"),
    [("Messages of the client", ClientMessage), ("Messages of the server", ServerMessage)],
)
def test_the_tables_have_the_number_and_fields_of_every_message(heading: str, union: Any) -> None:
    messages = [
        (str(each.__struct_config__.tag), f"`{each.__name__}`", described(each))
        for each in sorted(get_args(union), key=lambda each: each.__struct_config__.tag)
    ]
    assert [row[:3] for row in rows(heading)] == messages


def test_the_answers_in_the_tables_are_messages_of_the_server() -> None:
    names = {each.__name__ for each in get_args(ServerMessage)}
    answers = {
        name
        for row in rows("Messages of the client")
        for name in re.findall(r"`([A-Z]\w+)`", row[3])
    }
    assert answers <= names


def test_the_tables_have_the_fields_of_every_value() -> None:
    there = [
        each
        for each in (WireError, *vars(values).values())
        if isinstance(each, type)
        and issubclass(each, Struct)
        and each.__module__.startswith("tenure")
        and not each.__name__.startswith("_")
    ]
    described_there = [(f"`{each.__name__}`", described(each)) for each in there]
    assert sorted(rows("Values")) == sorted(described_there)


@pytest.mark.parametrize(
    "value",
    [values.Config, values.Found, values.RequestInfo, values.SessionInfo],
)
def test_a_value_has_every_field_of_its_counterpart(value: type[Any]) -> None:
    there = [each.name for each in dataclasses.fields(value.counterpart)]
    assert [each.name for each in fields(value)] == there


def test_the_features_are_named() -> None:
    assert all(f"`{feature}`" in PAGE for feature in FEATURES)


def test_the_greeting_on_the_page_is_what_a_client_sends() -> None:
    (shown,) = re.findall(r"^client  ([0-9a-f ]+)$", PAGE, re.MULTILINE)
    writer = FrameWriter(1 << 10)
    writer.add(Hello(1, 1, [], "", bytes(range(16))))
    assert bytes.fromhex(shown) == bytes(writer.take())
