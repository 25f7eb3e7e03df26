"""The calls about nodes: create, alter, drop, describe.

Each is answered with gRPC's OK; the operation in the answer has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeAlias

from tenure.core import rules
from tenure.engines.contract import Engine
from tenure.errors import InvalidArgument, NodeNotFound, TenureError
from tenure.model import Consistency, CountersMode, NodeConfig
from tenure.server.reads import Reader
from tenure.server.ydb.messages import Refused, Status, coordination, operation, scheme, status_of
from tenure.server.ydb.paths import Database

_OWNER = "tenure"
_CONSISTENCY: tuple[Consistency, ...] = ("unset", "strict", "relaxed")
_COUNTERS: tuple[CountersMode, ...] = ("unset", "aggregated", "detailed")


_Method: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]


def _answered(method: _Method) -> _Method:
    """Make the call's operation from a method's result or error."""

    @wraps(method)
    async def answer(*args: Any) -> Any:
        try:
            return operation(Status.SUCCESS, result=await method(*args))
        except Refused as refused:
            return operation(refused.status, refused.text)
        except NodeNotFound as error:
            return operation(Status.SCHEME_ERROR, str(error))
        except TenureError as error:
            return operation(status_of(error), str(error))

    return answer


class NodeCalls:
    """Each method takes the call's request and its client's engine, and returns its operation.

    A read also takes the schedule of its connection's reads.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @_answered
    async def create(self, request: Any, engine: Engine) -> Any:
        """Create a node."""
        path = self._path(request.path)
        if not self._database.has(path):
            text = f"a node's path is inside the database {self._database.path}: {path!r}"
            raise Refused(Status.BAD_REQUEST, text)
        await engine.create_node(self._node(path), _config(request), exist_ok=True)

    @_answered
    async def alter(self, request: Any, engine: Engine) -> Any:
        """Change the settings of a node."""
        node = self._node(self._path(request.path))
        if not request.HasField("config"):
            raise Refused(Status.GENERIC_ERROR, "the configuration is missing")
        await engine.alter_node(node, _config(request))

    @_answered
    async def drop(self, request: Any, engine: Engine) -> Any:
        """Drop a node; never by force."""
        node = self._node(self._path(request.path))
        try:
            rules.check_droppable(node)
        except InvalidArgument as error:
            raise Refused(Status.PRECONDITION_FAILED, str(error)) from error
        await engine.drop_node(node, force=False)

    @_answered
    async def describe(self, request: Any, engine: Engine, reader: Reader) -> Any:
        """Describe a node."""
        path = self._path(request.path)
        node = self._node(path)
        async with reader.lock, reader:
            found = await engine.describe_node(node)
        result = coordination.DescribeNodeResult()
        entry = result.self
        entry.name = path.rpartition("/")[2]
        entry.owner = _OWNER
        entry.type = scheme.Entry.COORDINATION_NODE
        result.config.SetInParent()  # it exists, even if all fields are zero
        _fill(result.config, found.config)
        return result

    @staticmethod
    def _path(path: str) -> str:
        if "/" not in path or path.endswith("/"):
            text = f"a path contains a '/', but not at its end: {path!r}"
            raise Refused(Status.BAD_REQUEST, text)
        return path

    def _node(self, path: str) -> str:
        node = self._database.node(path)
        if node is None:
            text = f"there is no {path!r} in the database {self._database.path}"
            raise Refused(Status.SCHEME_ERROR, text)
        try:
            rules.check_path(node)
        except InvalidArgument as error:
            raise Refused(Status.SCHEME_ERROR, str(error)) from error
        return node


def _config(request: Any) -> NodeConfig:
    given = request.config
    if given.path:
        raise Refused(Status.GENERIC_ERROR, "a configuration has no path")
    try:
        return NodeConfig(
            self_check_period=given.self_check_period_millis / 1000,
            session_grace_period=given.session_grace_period_millis / 1000,
            read_consistency=_CONSISTENCY[given.read_consistency_mode],
            attach_consistency=_CONSISTENCY[given.attach_consistency_mode],
            rate_limiter_counters_mode=_COUNTERS[given.rate_limiter_counters_mode],
        )
    except IndexError as error:
        raise Refused(Status.BAD_REQUEST, "the mode is unknown") from error


def _fill(config: Any, found: NodeConfig) -> None:
    config.self_check_period_millis = round(found.self_check_period * 1000)
    config.session_grace_period_millis = round(found.session_grace_period * 1000)
    config.read_consistency_mode = _CONSISTENCY.index(found.read_consistency)
    config.attach_consistency_mode = _CONSISTENCY.index(found.attach_consistency)
    config.rate_limiter_counters_mode = _COUNTERS.index(found.rate_limiter_counters_mode)
