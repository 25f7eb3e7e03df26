"""YDB's messages, from the `ydb` package, common small messages, and paths of nodes.

The package has generated modules for each major version of protobuf, and chooses among them when it
is imported. Its choice is used here, because a process can have only one definition of a message.

**Paths** (`Database`). The node ``/my-app`` is ``/local/my-app`` in the database ``/local``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.core import rules
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    InvalidArgument,
    NodeBusy,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.server.limits import LimitReached

__all__ = [
    "Refused",
    "Request",
    "Response",
    "Status",
    "coordination",
    "discovery",
    "failure",
    "issue",
    "operation",
    "scheme",
    "status_of",
]


DATABASE = "/local"
"""The default database."""


def normalized(path: str) -> str:
    """Return a path as YDB reads it: slashes at the ends and repeated slashes are ignored."""
    return "/" + "/".join(segment for segment in path.split("/") if segment)


class Database:
    """The only database of a listener.

    Raises:
        InvalidArgument: the path is invalid.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        rules.check_path(self.path)

    def is_meant_by(self, header: str) -> bool:
        """Return true if a client that names this database, or none, means this one."""
        return not header or normalized(header) == self.path

    def node(self, path: str) -> str | None:
        """Return the node of a path, or ``None`` if it is not inside the database."""
        return path[len(self.path) :] if self.has(path) else None

    def has(self, path: str) -> bool:
        """Return true if a path is inside the database, and not the database itself."""
        return path.startswith(self.path + "/")


if TYPE_CHECKING:
    from ydb._grpc.v6.protos import (
        ydb_coordination_pb2 as coordination,
    )
    from ydb._grpc.v6.protos import (
        ydb_discovery_pb2 as discovery,
    )
    from ydb._grpc.v6.protos import (
        ydb_issue_message_pb2 as issues,
    )
    from ydb._grpc.v6.protos import (
        ydb_operation_pb2 as operations,
    )
    from ydb._grpc.v6.protos import (
        ydb_scheme_pb2 as scheme,
    )
    from ydb._grpc.v6.protos import (
        ydb_status_codes_pb2 as codes,
    )
else:
    from ydb._grpc.common.protos import (
        ydb_coordination_pb2 as coordination,
    )
    from ydb._grpc.common.protos import (
        ydb_discovery_pb2 as discovery,
    )
    from ydb._grpc.common.protos import (
        ydb_issue_message_pb2 as issues,
    )
    from ydb._grpc.common.protos import (
        ydb_operation_pb2 as operations,
    )
    from ydb._grpc.common.protos import (
        ydb_scheme_pb2 as scheme,
    )
    from ydb._grpc.common.protos import (
        ydb_status_codes_pb2 as codes,
    )


Status = codes.StatusIds
Request = coordination.SessionRequest
Response = coordination.SessionResponse

_STATUSES: tuple[tuple[type[TenureError], int], ...] = (
    (SemaphoreNotFound, Status.NOT_FOUND),
    (NodeNotFound, Status.NOT_FOUND),
    (SemaphoreExists, Status.ALREADY_EXISTS),
    (SemaphoreBusy, Status.PRECONDITION_FAILED),
    (NodeBusy, Status.PRECONDITION_FAILED),
    (InvalidArgument, Status.BAD_REQUEST),
    (LimitReached, Status.OVERLOADED),
    (AuthenticationFailed, Status.UNAUTHORIZED),
    (SessionExpired, Status.SESSION_EXPIRED),
    (EngineUnavailable, Status.UNAVAILABLE),
    (Unsupported, Status.UNSUPPORTED),
)


class Refused(Exception):
    """Error: a call, or a session's start, is rejected with this status of YDB."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def status_of(error: TenureError) -> int:
    """Return the status of YDB for an error."""
    return next(
        (status for kind, status in _STATUSES if isinstance(error, kind)), Status.INTERNAL_ERROR
    )


def issue(text: str) -> Any:
    """Return the message of an error for people."""
    return issues.IssueMessage(message=text, severity=1)


def failure(status: int, text: str) -> Any:
    """Return the message that ends a session's stream with an error."""
    return Response(failure=Response.Failure(status=status, issues=[issue(text)]))


def operation(status: int, text: str = "", result: Any = None) -> Any:
    """Return the result of a call that is not a stream."""
    issues_found = [issue(text)] if text else []
    made = operations.Operation(ready=True, status=status, issues=issues_found)
    if result is not None:
        made.result.Pack(result)
    return made
