"""One attachment of a session: its lease, its key, and the commands in its name.

Rules:

* **The attach number** is the version of the session's key. Every attachment puts the key, and
  every command compares the version, so that etcd refuses whatever an older attachment still
  sends.
* **Unknown outcomes.** A command without an answer may have been done, or may be done yet. The
  session is attached anew first, under the next number: from then on what is still under way is
  refused. Then the command is sent again, by an operation that may find its own traces.
* **Order**: see `turns`.
* **Leaving.** A lease is revoked only if no other client may have attached the session meanwhile: a
  session that can be taken over is first given back, by a compare with its key. A command without
  an answer is sent again for a window; then there is nothing left to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenure.engines.contract import SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import Name, Record
from tenure.engines.etcd.members import Lost, Refused, failure
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.turns import Turns
from tenure.errors import SessionExpired, TenureError

__all__ = ["Attachment"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_LEAST_PATIENCE = 0.5


class Attachment:
    """One attachment, without its requests.

    Attributes:
        key: the session's key.
        record: what stands there.
        version: of the key; the attach number.
        mine: what every command compares.
        window: seconds that it survives without contact.
        resumable: whether another program may take it over.
        proven_at: when the latest renewal that was answered was sent.
        over: it has ended, or been left; no events of it are delivered any more.
        turns: its operations.
    """

    def __init__(
        self,
        engine: EtcdCluster,
        path: str,
        number: int,
        record: Record,
        version: int,
        events: SessionEvents,
    ) -> None:
        self.engine = engine
        self.path = path
        self.id = number
        self.key = engine.keys.session(path, number)
        self.record = record
        self.window = record.window
        self.resumable = record.liveness == "window"
        self.events = events
        self.patience = min(engine.patience, max(record.window / 6, _LEAST_PATIENCE))
        self.get = wire.get(wire.range_(self.key))
        self.believes = self.key + b"/b/" + record.token.encode()
        self.proven_at = float("-inf")
        self.over = False
        self.turns = Turns(engine.spawn, self._told)
        self._why_over: TenureError | None = None
        self._closing = False
        self._attaching = asyncio.Lock()
        self.became(version)

    @property
    def attach_number(self) -> int:
        return self.version

    def became(self, version: int) -> None:
        """The number of the attachment is another one."""
        self.version = version
        self.mine = wire.version_is(self.key, version)

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as it was read, names this attachment."""
        return kv is not None and Record.read(kv.value).token == self.record.token

    def judge(self, kv: KeyValue | None) -> bool:
        """Act on the session's key as it was read; whether the session goes on."""
        if kv is None:
            self.end("its window has passed in the store, or an administrator ended it")
        elif not self.is_mine(kv):
            self.superseded()
        elif kv.version > self.version:
            self.became(kv.version)
        return not self.over

    def prove(self, at: float) -> None:
        """The lease was extended, in answer to what was sent then. From any thread."""
        if not self.over and not self._closing:
            self.proven_at = max(self.proven_at, at)
            self.events.proven(at)

    def end(self, why: str) -> None:
        """End by the store's word."""
        raise NotImplementedError

    def superseded(self) -> None:
        """End because another attachment has taken over."""
        raise NotImplementedError

    # Asking

    async def ask(
        self, build: Callable[[], bytes], leaving: EtcdRequest | None = None
    ) -> tuple[answers.Answer, bool]:
        """Send a transaction; returns its answer, and whether it may have been carried out before.

        It compares `mine`, and reads the session's key first where something does not hold.

        Args:
            leaving: the request that the transaction deletes.

        Raises:
            SessionExpired: the session is over.
            Refused: it was refused.
        """
        again = False
        while True:
            self.check()
            version = self.version
            try:
                answer = await self.engine.txn(build(), self.patience)
            except Lost:
                again = True
                if leaving is not None:
                    leaving.perhaps_left = True
                await self.attach_anew(version)
                continue
            if answer.ok:
                return answer, again
            kv = answer.parts[0].first
            if kv is not None and kv.version == version and self.is_mine(kv):
                return answer, again
            self.judge(kv)

    def _told(self, error: Refused | asyncio.CancelledError, name: str) -> TenureError:
        """Make the caller's error of a refusal or a cancellation."""
        if isinstance(error, Refused):
            if not error.no_lease:
                return failure(self.engine.url, error, node=self.path, name=name)
            self.end("its lease has run out, or was revoked")
        return self._why_over or self._gone()

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority; repeated until it is answered.

        Raises:
            SessionExpired: the session is over.
            Refused: it was refused.
        """
        pause = _FIRST_PAUSE
        while True:
            self.check()
            try:
                return await self.engine.txn(wire.txn((), parts), self.patience)
            except Lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def attach_anew(self, version: int) -> None:
        """See to it that the number of the attachment is above that one."""
        async with self._attaching:
            pause = _FIRST_PAUSE
            while self.version == version:
                self.check()
                put = wire.put(self.key, self.record.value(), self.id)
                try:
                    answer = await self.engine.txn(
                        wire.txn((self.mine,), (put,), (self.get,)), self.patience
                    )
                except Lost:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                else:
                    if answer.ok:
                        self.became(version + 1)
                    else:
                        self.judge(answer.parts[0].first)

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.over:
            raise self._why_over or self._gone()

    def expired(self) -> SessionExpired:
        """The error for a session whose window has passed without an answer."""
        path = self.path
        return SessionExpired(f"the session on {path} could not be renewed in time", node=path)

    def _gone(self) -> SessionExpired:
        return SessionExpired(f"the session on {self.path} is over", node=self.path)

    def name(self, name: str) -> Name:
        """The keys of a semaphore on its node."""
        return self.engine.name(self.path, name)

    # Leaving

    async def give_back(self) -> bool:
        """Mark the session as detached; false if another client has attached it meanwhile."""
        engine, record = self.engine, self.record
        free = Record(
            *(record.token, False, record.window, record.description, record.liveness, record.key)
        )
        then = (wire.put(self.key, free.value(), self.id), wire.delete(self.believes))
        until = engine.clock.now() + self.window
        pause = _FIRST_PAUSE
        while engine.clock.now() < until:
            try:
                await engine.keep_alive(self)
                answer = await engine.txn(wire.txn((self.mine,), then, (self.get,)), self.patience)
            except Lost:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except Refused as refused:
                if refused.no_lease:
                    return False
                raise failure(engine.url, refused, node=self.path) from refused
            else:
                if answer.ok:
                    return True
                kv = answer.parts[0].first
                if kv is None or not self.is_mine(kv):
                    await self.acknowledge()
                    return False
                if not Record.read(kv.value).attached:
                    return True  # an earlier attempt has done it
                self.became(kv.version)
        return False

    async def acknowledge(self) -> None:
        """Tell the store that this attachment considers itself over."""
        request = wire.txn((), (wire.delete(self.believes),))
        await self.engine.eventually(request, self.window, "an acknowledgement")
