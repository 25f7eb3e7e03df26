"""Store of ``folder://``: the model of tenure, kept in one JSON file between two operations.

`tenure.core` has the rules of the model as a state machine. A transaction takes the lock of the
folder, makes a `Store` of the file, ends what has run out, lets an operation change it, and
replaces the file. One that raises changes nothing.

* Events of a session wait in its ``sink``, a list, until its process reads them.
* Times are readings of the host's clock since its start. After another start all processes are
  gone, and so are the sessions.
"""

from __future__ import annotations

import fcntl
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tenure.clock import Clock
from tenure.core.node import StoredSession
from tenure.core.store import CHANGED, DELETED, ENDED, EVICTED, GRANTED, TIMED_OUT, Store
from tenure.engines.contract import Removal
from tenure.errors import EngineUnavailable, TenureError
from tenure.model import NodeConfig

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REMOVALS = {TIMED_OUT: Removal.TIMED_OUT, DELETED: Removal.DELETED, EVICTED: Removal.EVICTED}
_SESSION = ("description", "window", "contact", "id")
_FACTS = ("request_id", "count", "order_id", "joined_at", "granted_at", "deadline")  # of a request


class Folder:
    """The folder of a store; it is created with the first transaction."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock
        self._boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""

    @contextmanager
    def transaction(self) -> Iterator[tuple[Store, float]]:
        """Have the store to oneself in the block, with the time; its changes are kept at the end.

        Raises:
            EngineUnavailable: the folder or its files cannot be used.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with open(self._path / "lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
                before, now = self.read(), self._clock.now()
                store = self._load(json.loads(before)) if before else Store()
                store.expire(now)
                yield store, now
                _keep_events(store)
                after = json.dumps(self._dump(store)).encode()
                if after != before:
                    (self._path / "new").write_bytes(after)
                    os.replace(self._path / "new", self._path / "store.json")
        except TenureError:  # some of them are OSErrors too
            raise
        except OSError as error:
            raise EngineUnavailable(f"the folder {self._path} cannot be used: {error}") from error

    def read(self) -> bytes:
        """Return the file as it is, without the lock; empty before the first transaction."""
        try:
            return (self._path / "store.json").read_bytes()
        except OSError:  # a transaction says why
            return b""

    def _dump(self, store: Store) -> dict[str, Any]:
        return {
            "boot": self._boot,
            "last_ids": [store.last_order_id, store.last_session_id],
            "nodes": {
                path: {
                    "config": asdict(node.config),
                    "sessions": [_dump_session(each) for each in node.sessions.values()],
                    "semaphores": {
                        name: [each.ephemeral, each.limit, b64encode(each.data).decode()]
                        for name, each in node.semaphores.items()
                    },
                }
                for path, node in store.nodes.items()
            },
        }

    def _load(self, document: dict[str, Any]) -> Store:
        store = Store()
        requests: list[tuple[StoredSession, dict[str, Any]]] = []
        for path, saved in document["nodes"].items():
            store.create_node(path, NodeConfig(), exist_ok=True)
            store.alter_node(path, NodeConfig(**saved["config"]))
            node = store.node(path)
            for name, (ephemeral, limit, data) in saved["semaphores"].items():
                if not ephemeral:
                    store.create(node, name, limit, b64decode(data), exist_ok=False)
            for row in saved["sessions"] if document["boot"] == self._boot else ():
                what, window, at, number = (row[key] for key in _SESSION)
                session = store.attach(path, what, window, "process", b"", at, number)
                session.attached, session.sink = row["attached"], row["events"]
                for name, data, owners, number in row["watches"]:
                    store.watch(session, name, data=data, owners=owners, sink=number)
                requests += [(session, request) for request in row["requests"]]
        for session, row in sorted(requests, key=lambda each: each[1]["order_id"]):
            _load_request(store, session, row)
        store.effects.clear()  # they were delivered when they happened
        for path, saved in document["nodes"].items():
            for name, (ephemeral, _, data) in saved["semaphores"].items():
                if ephemeral and name in store.node(path).semaphores:
                    store.node(path).semaphores[name].data = b64decode(data)
        store.last_order_id, store.last_session_id = document["last_ids"]
        return store


def _dump_session(session: StoredSession) -> dict[str, Any]:
    return {
        "id": session.id,
        "description": session.description,
        "window": session.window,
        "contact": session.last_contact,
        "attached": session.attached,
        "events": session.sink,
        "watches": [[w.name, w.data, w.owners, w.sink] for w in session.watches],
        "requests": [
            {
                "name": each.semaphore.name,
                "ephemeral": each.semaphore.ephemeral,
                "data": b64encode(each.data).decode(),
                **{fact: getattr(each, fact) for fact in _FACTS},
            }
            for each in session.requests.values()
        ],
    }


def _load_request(store: Store, session: StoredSession, row: dict[str, Any]) -> None:
    how = (row["request_id"], row["name"], row["count"], b64decode(row["data"]), None)
    request = store.enqueue(session, *how, row["ephemeral"], row["joined_at"], row["order_id"])
    assert request is not None
    if request.granted_at is None:  # its deadline is a time, and so it is counted from zero
        store.alter(session, row["request_id"], None, None, 0.0, row["deadline"])
    else:  # the rule that grants has not changed, and so it owned before
        request.granted_at = row["granted_at"]


def _keep_events(store: Store) -> None:
    """Keep the events of the model with their sessions."""
    for session, kind, what in store.effects:
        if kind == GRANTED:
            session.sink.append(["granted", what.request_id, what.order_id])
        elif kind == CHANGED:
            session.sink.append(["changed", what.sink])
        elif kind != ENDED:  # an ended session is not there any more, and its process sees that
            session.sink.append(["removed", what.request_id, _REMOVALS[kind].value])
    store.effects.clear()
