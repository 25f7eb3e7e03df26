"""The calls about nodes: create, alter, drop, describe.

Each is answered with gRPC's OK and says in its operation how it went.
"""

from __future__ import annotations

from typing import Any

from tenure.core import rules
from tenure.engines.contract import Engine
from tenure.errors import InvalidArgument, NodeNotFound, TenureError
from tenure.model import Consistency, CountersMode, NodeConfig
from tenure.server.reads import Reader
from tenure.server.ydb.messages import Status, coordination, operation, scheme, status_of
from tenure.server.ydb.paths import Database

__all__ = ["NodeCalls"]

_OWNER = "tenure"
_CONSISTENCY: tuple[Consistency, ...] = ("unset", "strict", "relaxed")
_COUNTERS: tuple[CountersMode, ...] = ("unset", "aggregated", "detailed")


class _Wrong(Exception):
    """The call is refused: with which status, and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class NodeCalls:
    """Each method takes the call's request and its client's engine, and returns its operation.

    A read takes the turns of its connection's reads, too.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, request: Any, engine: Engine) -> Any:
        async def work() -> Any:
            path = self._path(request.path)
            if not self._database.has(path):
                text = f"a node's path is inside the database {self._database.path}: {path!r}"
                raise _Wrong(Status.BAD_REQUEST, text)
            node = self._node(path)
            await engine.create_node(node, _config(request), exist_ok=True)
            return operation(Status.SUCCESS)

        return await _answered(work())

    async def alter(self, request: Any, engine: Engine) -> Any:
        async def work() -> Any:
            node = self._node(self._path(request.path))
            if not request.HasField("config"):
                raise _Wrong(Status.GENERIC_ERROR, "the configuration is missing")
            await engine.alter_node(node, _config(request))
            return operation(Status.SUCCESS)

        return await _answered(work())

    async def drop(self, request: Any, engine: Engine) -> Any:
        async def work() -> Any:
            node = self._node(self._path(request.path))
            try:
                rules.check_droppable(node)
            except InvalidArgument as error:
                raise _Wrong(Status.PRECONDITION_FAILED, str(error)) from error
            await engine.drop_node(node, force=False)
            return operation(Status.SUCCESS)

        return await _answered(work())

    async def describe(self, request: Any, engine: Engine, reader: Reader) -> Any:
        async def work() -> Any:
            path = self._path(request.path)
            node = self._node(path)
            async with reader.lock, reader:
                found = await engine.describe_node(node)
            result = coordination.DescribeNodeResult()
            entry = result.self
            entry.name = path.rpartition("/")[2]
            entry.owner = _OWNER
            entry.type = scheme.Entry.COORDINATION_NODE
            result.config.SetInParent()  # it is there, though all of it be zero
            _fill(result.config, found.config)
            return operation(Status.SUCCESS, result=result)

        return await _answered(work())

    @staticmethod
    def _path(path: str) -> str:
        if "/" not in path or path.endswith("/"):
            text = f"a path has a '/' in it, and none at its end: {path!r}"
            raise _Wrong(Status.BAD_REQUEST, text)
        return path

    def _node(self, path: str) -> str:
        node = self._database.node(path)
        if node is None:
            text = f"there is no {path!r} in the database {self._database.path}"
            raise _Wrong(Status.SCHEME_ERROR, text)
        try:
            rules.check_path(node)
        except InvalidArgument as error:
            raise _Wrong(Status.SCHEME_ERROR, str(error)) from error
        return node


async def _answered(work: Any) -> Any:
    try:
        return await work
    except _Wrong as wrong:
        return operation(wrong.status, wrong.text)
    except NodeNotFound as error:
        return operation(Status.SCHEME_ERROR, str(error))
    except TenureError as error:
        return operation(status_of(error), str(error))


def _config(request: Any) -> NodeConfig:
    given = request.config
    if given.path:
        raise _Wrong(Status.GENERIC_ERROR, "a configuration has no path of its own")
    try:
        return NodeConfig(
            self_check_period=given.self_check_period_millis / 1000,
            session_grace_period=given.session_grace_period_millis / 1000,
            read_consistency=_CONSISTENCY[given.read_consistency_mode],
            attach_consistency=_CONSISTENCY[given.attach_consistency_mode],
            rate_limiter_counters_mode=_COUNTERS[given.rate_limiter_counters_mode],
        )
    except IndexError as error:
        raise _Wrong(Status.BAD_REQUEST, "a mode that is not known here") from error


def _fill(config: Any, found: NodeConfig) -> None:
    config.self_check_period_millis = round(found.self_check_period * 1000)
    config.session_grace_period_millis = round(found.session_grace_period * 1000)
    config.read_consistency_mode = _CONSISTENCY.index(found.read_consistency)
    config.attach_consistency_mode = _CONSISTENCY.index(found.attach_consistency)
    config.rate_limiter_counters_mode = _COUNTERS.index(found.rate_limiter_counters_mode)
