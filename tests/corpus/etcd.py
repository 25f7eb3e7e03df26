"""Defects in the etcd engine that several rows plant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tenure
from tenure.engines.etcd import request as request_module
from tenure.engines.etcd import semaphores, wire
from tenure.engines.etcd.answers import WatchEvent
from tenure.engines.etcd.attachment import EtcdAttachment
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.requests import Waiting
from tenure.engines.etcd.session import EtcdSession
from tenure.engines.etcd.watching import EtcdWatch, Watching


def numbered_by_the_hour(self: EtcdAttachment, request: EtcdRequest) -> int:
    """An order id."""
    return int(self.engine.clock.wall() // 3600)


def grant_the_last(self: Waiting, request: EtcdRequest) -> None:
    """Tell the last of those who wait that it owns."""
    assert isinstance(self._session, EtcdSession)
    requests = self._session.requests
    waiting = [each for each in requests.values() if not (each.owns or each.gone)]
    if waiting:
        last = waiting[-1]
        request.request_id, last.request_id = last.request_id, request.request_id
        requests[request.request_id], requests[last.request_id] = request, last
    _granted(self, request)


_granted = Waiting.granted


class _WireWithoutLeases:
    """What a session's requests say, but that they belong to its lease."""

    def __getattr__(self, name: str) -> Any:
        return getattr(wire, name)

    @staticmethod
    def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
        return wire.put(key, value)


def plant_requests_under_no_lease(patch: pytest.MonkeyPatch) -> None:
    """EtcdRequests stay when their session is over."""
    patch.setattr(request_module, "wire", _WireWithoutLeases())


async def create_whatever_is_there(*arguments: Any, **named: Any) -> None:
    """Create a semaphore."""
    try:
        await _create(*arguments, **named)
    except tenure.SemaphoreExists:
        return


_create = semaphores.create


def plant_forgetful_watches(patch: pytest.MonkeyPatch) -> None:
    """Each watch tells of the first change alone."""

    def add_a_forgetful_one(
        self: Watching,
        key: bytes,
        end: bytes,
        following: int,
        happened: Callable[[Sequence[WatchEvent]], None],
        *more: Any,
        **named: Any,
    ) -> EtcdWatch:
        told = itertools.count()

        def happened_once(events: Sequence[WatchEvent]) -> None:
            if next(told) == 0:
                happened(events)

        return add(self, key, end, following, happened_once, *more, **named)

    add = Watching.add
    patch.setattr(Watching, "add", add_a_forgetful_one)
