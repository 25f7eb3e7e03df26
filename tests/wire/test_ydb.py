"""The schema of YDB's messages: it agrees with the definitions that YDB's SDK brings."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tenure.wire.ydb import SessionRequest, Status, message_class

FILES = {
    "Auth": "ydb_auth_pb2",
    "Coordination": "ydb_coordination_pb2",
    "Discovery": "ydb_discovery_pb2",
    "Issue": "ydb_issue_message_pb2",
    "Operations": "ydb_operation_pb2",
}
AS_NUMBERS = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}


def sdk(file: str) -> Any:
    return importlib.import_module(f"ydb._grpc.common.protos.{file}")


def fields(message: Any) -> dict[str, tuple[object, ...]]:
    """All that decides how a field is encoded."""
    return {
        field.name: (
            field.number,
            AS_NUMBERS.get(field.type, field.type),
            field.is_repeated,
            field.message_type and field.message_type.name,
            field.containing_oneof and field.containing_oneof.name,
        )
        for field in message.fields
    }


def declared() -> list[Any]:
    """The messages of the schema, but for the containers that stand for packages."""
    packages = SessionRequest.DESCRIPTOR.file.message_types_by_name
    assert set(packages) == {"Any", *FILES}
    found, left = [], [each for name in FILES for each in packages[name].nested_types]
    while left:
        found.append(left.pop())
        left += found[-1].nested_types
    return found


@pytest.mark.parametrize("message", declared(), ids=lambda message: message.full_name)
def test_a_message_is_encoded_as_the_sdk_does(message: Any) -> None:
    _, package, *path = message.full_name.split(".")
    theirs = getattr(sdk(FILES[package]), path[0])
    for name in path[1:]:
        theirs = getattr(theirs, name)
    ours = fields(message)
    assert ours == {name: each for name, each in fields(theirs.DESCRIPTOR).items() if name in ours}


def test_the_statuses_are_the_sdks() -> None:
    theirs = dict(sdk("ydb_status_codes_pb2").StatusIds.StatusCode.items())
    del theirs["STATUS_CODE_UNSPECIFIED"]  # no answer has it
    assert {status.name: status.value for status in Status} == theirs


def test_fields_that_are_not_declared_are_skipped() -> None:
    entry = sdk("ydb_discovery_pb2").EndpointInfo(address="db", port=1, node_id=7, location="a")
    ours = message_class("Discovery.EndpointInfo").FromString(entry.SerializeToString())
    assert (ours.address, ours.port) == ("db", 1)
