"""Messages of YDB's coordination service, and of its discovery and login.

The schema below declares the fields that tenure uses. protobuf skips the others. The messages have
their own descriptor pool, so that YDB's SDK can be used in the same process.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any, TypeAlias

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

Message: TypeAlias = Any
"""A message, whose class is made at run time."""

# Enumerations are declared as numbers, which is how they are encoded.
_SCHEMA = """
Any
  string type_url = 1, bytes value = 2
Issue.IssueMessage
  string message = 2
Operations.Operation
  bool ready = 2, int32 status = 3, repeated Issue.IssueMessage issues = 4, Any result = 5
Auth.LoginRequest
  string user = 2, string password = 3
Auth.LoginResponse
  Operations.Operation operation = 1
Auth.LoginResult
  string token = 1
Discovery.ListEndpointsRequest
  string database = 1
Discovery.ListEndpointsResponse
  Operations.Operation operation = 1
Discovery.ListEndpointsResult
  repeated Discovery.EndpointInfo endpoints = 1
Discovery.EndpointInfo
  string address = 1, uint32 port = 2, bool ssl = 4
  repeated string ip_v4 = 8, repeated string ip_v6 = 9, string ssl_target_name_override = 10
Coordination.Config
  uint32 self_check_period_millis = 2, uint32 session_grace_period_millis = 3
  int32 read_consistency_mode = 4, int32 attach_consistency_mode = 5
  int32 rate_limiter_counters_mode = 6
Coordination.CreateNodeRequest
  string path = 1, Coordination.Config config = 2
Coordination.CreateNodeResponse
  Operations.Operation operation = 1
Coordination.AlterNodeRequest
  string path = 1, Coordination.Config config = 2
Coordination.AlterNodeResponse
  Operations.Operation operation = 1
Coordination.DropNodeRequest
  string path = 1
Coordination.DropNodeResponse
  Operations.Operation operation = 1
Coordination.DescribeNodeRequest
  string path = 1
Coordination.DescribeNodeResponse
  Operations.Operation operation = 1
Coordination.DescribeNodeResult
  Coordination.Config config = 2
Coordination.SemaphoreSession
  uint64 session_id = 1, uint64 timeout_millis = 2, uint64 count = 3, bytes data = 4
  uint64 order_id = 5
Coordination.SemaphoreDescription
  string name = 1, bytes data = 2, uint64 limit = 3, bool ephemeral = 4
  repeated Coordination.SemaphoreSession owners = 5
  repeated Coordination.SemaphoreSession waiters = 6, uint64 count = 7
Coordination.SessionRequest
  oneof request
  .PingPong ping = 1, .PingPong pong = 2, .SessionStart session_start = 3
  .SessionStop session_stop = 4, .AcquireSemaphore acquire_semaphore = 7
  .ReleaseSemaphore release_semaphore = 8, .DescribeSemaphore describe_semaphore = 9
  .CreateSemaphore create_semaphore = 10, .UpdateSemaphore update_semaphore = 11
  .DeleteSemaphore delete_semaphore = 12
Coordination.SessionRequest.PingPong
  uint64 opaque = 1
Coordination.SessionRequest.SessionStart
  string path = 1, uint64 session_id = 2, uint64 timeout_millis = 3, string description = 4
  uint64 seq_no = 5, bytes protection_key = 6
Coordination.SessionRequest.SessionStop
Coordination.SessionRequest.AcquireSemaphore
  uint64 req_id = 1, string name = 2, uint64 timeout_millis = 3, uint64 count = 4
  bytes data = 5, bool ephemeral = 6
Coordination.SessionRequest.ReleaseSemaphore
  uint64 req_id = 1, string name = 2
Coordination.SessionRequest.DescribeSemaphore
  uint64 req_id = 1, string name = 2, bool include_owners = 3, bool include_waiters = 4
  bool watch_data = 5, bool watch_owners = 6
Coordination.SessionRequest.CreateSemaphore
  uint64 req_id = 1, string name = 2, uint64 limit = 3, bytes data = 4
Coordination.SessionRequest.UpdateSemaphore
  uint64 req_id = 1, string name = 2, bytes data = 3
Coordination.SessionRequest.DeleteSemaphore
  uint64 req_id = 1, string name = 2, bool force = 3
Coordination.SessionResponse
  oneof response
  .PingPong ping = 1, .PingPong pong = 2, .Failure failure = 3
  .SessionStarted session_started = 4, .SessionStopped session_stopped = 5
  .AcquireSemaphorePending acquire_semaphore_pending = 8
  .AcquireSemaphoreResult acquire_semaphore_result = 9
  .ReleaseSemaphoreResult release_semaphore_result = 10
  .DescribeSemaphoreResult describe_semaphore_result = 11
  .DescribeSemaphoreChanged describe_semaphore_changed = 12
  .CreateSemaphoreResult create_semaphore_result = 13
  .UpdateSemaphoreResult update_semaphore_result = 14
  .DeleteSemaphoreResult delete_semaphore_result = 15
Coordination.SessionResponse.PingPong
  uint64 opaque = 1
Coordination.SessionResponse.Failure
  int32 status = 1, repeated Issue.IssueMessage issues = 2
Coordination.SessionResponse.SessionStarted
  uint64 session_id = 1, uint64 timeout_millis = 2
Coordination.SessionResponse.SessionStopped
  uint64 session_id = 1
Coordination.SessionResponse.AcquireSemaphorePending
  uint64 req_id = 1
Coordination.SessionResponse.AcquireSemaphoreResult
  uint64 req_id = 1, int32 status = 2, repeated Issue.IssueMessage issues = 3, bool acquired = 4
Coordination.SessionResponse.ReleaseSemaphoreResult
  uint64 req_id = 1, int32 status = 2, repeated Issue.IssueMessage issues = 3, bool released = 4
Coordination.SessionResponse.DescribeSemaphoreResult
  uint64 req_id = 1, int32 status = 2, repeated Issue.IssueMessage issues = 3
  Coordination.SemaphoreDescription semaphore_description = 4, bool watch_added = 5
Coordination.SessionResponse.DescribeSemaphoreChanged
  uint64 req_id = 1, bool data_changed = 2, bool owners_changed = 3
Coordination.SessionResponse.CreateSemaphoreResult
  uint64 req_id = 1, int32 status = 2, repeated Issue.IssueMessage issues = 3
Coordination.SessionResponse.UpdateSemaphoreResult
  uint64 req_id = 1, int32 status = 2, repeated Issue.IssueMessage issues = 3
Coordination.SessionResponse.DeleteSemaphoreResult
  uint64 req_id = 1, int32 status = 2, repeated Issue.IssueMessage issues = 3
"""
_FIELD = re.compile(r"(repeated )?(\.?)([\w.]+) (\w+) = (\d+)")


class Status(IntEnum):
    """Status of an answer."""

    SUCCESS = 400000
    BAD_REQUEST = 400010
    UNAUTHORIZED = 400020
    INTERNAL_ERROR = 400030
    ABORTED = 400040
    UNAVAILABLE = 400050
    OVERLOADED = 400060
    SCHEME_ERROR = 400070
    GENERIC_ERROR = 400080
    TIMEOUT = 400090
    BAD_SESSION = 400100
    PRECONDITION_FAILED = 400120
    ALREADY_EXISTS = 400130
    NOT_FOUND = 400140
    SESSION_EXPIRED = 400150
    CANCELLED = 400160
    UNDETERMINED = 400170
    UNSUPPORTED = 400180
    SESSION_BUSY = 400190
    EXTERNAL_ERROR = 400200


def _described(schema: str) -> FileDescriptorProto:
    """Return the schema in protobuf's form."""
    file = FileDescriptorProto(name="tenure/ydb.proto", package="Ydb", syntax="proto3")
    scopes: dict[str, Any] = {}
    name = ""
    for line in schema.strip().splitlines():
        if not line.startswith(" "):
            scope, name = file, ""
            for part in line.split("."):
                name = f"{name}.{part}"
                if name not in scopes:
                    nested = file.message_type if scope is file else scope.nested_type
                    scopes[name] = nested.add(name=part)
                scope = scopes[name]
        elif line.startswith("  oneof "):
            scope.oneof_decl.add(name=line.split()[1])
        else:
            for repeated, inner, kind, field, number in _FIELD.findall(line):
                scalar = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}", None)
                made = scope.field.add(name=field, number=int(number))
                made.label = made.LABEL_REPEATED if repeated else made.LABEL_OPTIONAL
                made.type = made.TYPE_MESSAGE if scalar is None else scalar
                if scalar is None:
                    made.type_name = f".Ydb{name}.{kind}" if inner else f".Ydb.{kind}"
                if scope.oneof_decl:
                    made.oneof_index = 0
    return file


_pool = DescriptorPool()
_pool.Add(_described(_SCHEMA))


def message_class(name: str) -> Any:
    """Return the class of a message, such as ``Coordination.SessionRequest``."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"Ydb.{name}"))


def unpacked(operation: Message, name: str) -> Message:
    """Return the result of an operation, a message of that class."""
    return message_class(name).FromString(operation.result.value)


SessionRequest = message_class("Coordination.SessionRequest")
SessionResponse = message_class("Coordination.SessionResponse")
