"""One attachment of a session: its lease, its key and its transactions.

Rules:

* **The attach number** is the version of the session's key. Every attachment puts the key, and
  every transaction compares the version. So etcd rejects transactions of an older attachment.
* **Unknown outcomes.** A transaction without an answer may have been carried out, or may be carried
  out later. The session is first reattached under the next number, so that etcd rejects the old
  transaction. Then the operation sends it again; it may find its own results. Other transactions
  are not sent before that is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tenure.core import rules
from tenure.engines._kit.session import SessionBase
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.errors import Lost, Refused, pauses
from tenure.engines.etcd.keys import Name, Record
from tenure.engines.etcd.operations import EtcdOperations
from tenure.engines.etcd.request import EtcdRequest
from tenure.errors import SessionExpired, TenureError

_LEAST_TIMEOUT = 0.5


@dataclass(frozen=True, slots=True)
class WrittenAttachment:
    """An attachment that was written to the store.

    Attributes:
        how: the program's arguments.
        events: receives the events of the session.
        number: the session's number.
        record: the value of the session's key.
        version: the version of the key.
    """

    how: Attach
    events: SessionEvents
    number: int
    record: Record
    version: int


class EtcdAttachment(SessionBase):
    """One attachment, without its requests.

    Attributes:
        key: the session's key.
        record: the value of the key.
        version: the version of the key, which is the attach number.
        mine: the comparison in every transaction.
        get: reads the key.
        claim: the key that exists while this attachment may consider leases held.
        resumable: whether another program may take it over.
        proven_at: when the latest answered renewal was sent.
        operations: the program's operations.
    """

    def __init__(self, engine: EtcdCluster, attached: WrittenAttachment) -> None:
        record, number = attached.record, attached.number
        super().__init__(attached.how, attached.events, number, record.window)
        self.engine = engine
        self.key = engine.keys.session(self.path, number)
        self.record = record
        self.resumable = record.liveness == "window"
        self.timeout = min(engine.timeout, max(record.window / 6, _LEAST_TIMEOUT))
        self.get = wire.get(self.key)
        self.claim = record.claim(self.key)
        self.proven_at = float("-inf")
        self.operations = EtcdOperations(engine.tasks, self._error_of)
        self._attaching = asyncio.Lock()
        self._attaching_since = 0.0
        self.became(attached.version)

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return self.version

    @property
    def credential(self) -> str:
        """The token of the attachment."""
        return self.record.token

    def became(self, version: int) -> None:
        """Set the attach number."""
        self.version = version
        self.mine = wire.version_is(self.key, version)

    def is_mine(self, kv: KeyValue | None) -> bool:
        """Return true if the key, as read, identifies this attachment."""
        return kv is not None and Record.read(kv.value).token == self.record.token

    def judge(self, kv: KeyValue | None) -> bool:
        """Process the session's key as read; return true if the session continues."""
        if kv is None:
            self.end("its window has passed in the store, or an administrator ended it")
        elif not self.is_mine(kv):
            self.superseded()
        elif kv.version > self.version:
            self.became(kv.version)
        return not self.over

    def prove(self, at: float) -> None:
        """Record that the lease was extended by a request sent at that time. From any thread."""
        if not self.over and not self.closing:
            self.proven_at = max(self.proven_at, at)
            self.events.proven(at)

    # Transactions

    async def transact(
        self,
        build: Callable[[], bytes],
        leaving: EtcdRequest | None = None,
        joining: EtcdRequest | None = None,
    ) -> tuple[answers.Answer, bool]:
        """Send a transaction, repeatedly if needed.

        It compares `mine`, and its first operation reads the session's key if a comparison fails.

        Args:
            build: makes the transaction; called for each attempt.
            leaving: the request that the transaction deletes.
            joining: the request that the transaction adds.

        Returns:
            The answer, and whether an earlier attempt may have been carried out.

        Raises:
            SessionExpired: the session has ended.
            Refused: it was rejected.
        """
        again = False
        while True:
            if self.over:
                raise self.reason
            version = self.version
            if self._attaching.locked():
                await self._reattach(version)
                continue
            if joining is not None:
                joining.sent, joining.drop = True, None
            try:
                data = await self.engine.members.call(wire.TXN, build(), self.timeout)
            except Lost:
                again = True
                if leaving is not None:
                    leaving.may_have_left = True
                await self._reattach(version)
                continue
            answer = answers.read_answer(data)
            if answer.ok:
                return answer, again
            kv = answer.parts[0].first
            if kv is not None and kv.version == version and self.is_mine(kv):
                return answer, again
            self.judge(kv)

    def _error_of(self, error: BaseException, name: str) -> TenureError:
        """Return the caller's error for a rejection or a cancellation."""
        if isinstance(error, Refused):
            if not error.no_lease:
                return self.engine.failure(error, self.path, name)
            self.end("its lease has expired, or was revoked")
        return self.reason

    async def read(self, *parts: bytes) -> answers.Answer:
        """Read at one revision of a majority, repeating it until it is answered.

        Raises:
            SessionExpired: the session has ended.
            Refused: it was rejected.
        """
        pause = pauses()
        while True:
            self.check()
            try:
                return await self.engine.txn(wire.txn((), parts), self.timeout)
            except Lost:
                await asyncio.sleep(next(pause))

    @property
    def in_contact(self) -> bool:
        """False while etcd answers no watch, or has answered no transaction for the timeout."""
        attaching_for = self.engine.clock.now() - self._attaching_since
        answers = not self._attaching.locked() or attaching_for < self.timeout
        return answers and self.engine.watching.is_up

    async def _reattach(self, version: int) -> None:
        """Raise the attach number above `version`."""
        async with self._attaching:
            pause, self._attaching_since = pauses(), self.engine.clock.now()
            while self.version == version:
                self.check()
                put = wire.put(self.key, self.record.value(), self.id)
                try:
                    answer = await self.engine.txn(
                        wire.txn((self.mine,), (put,), (self.get,)), self.timeout
                    )
                except Lost:
                    await asyncio.sleep(next(pause))
                else:
                    if answer.ok:
                        self.became(version + 1)
                    else:
                        self.judge(answer.parts[0].first)

    def expired(self) -> SessionExpired:
        """Return the error for a session whose window has passed without an answer."""
        message = f"the session on {self.path} could not be renewed within its recovery window"
        return SessionExpired(message, node=self.path)

    def check_open(self) -> None:
        """Raise the reason if the session accepts no operations."""
        if self.over or self.closing:
            raise self.reason

    def name(self, name: str) -> Name:
        """Return the keys of a semaphore on its node. Raises `InvalidArgument`."""
        rules.check_name(name, self.path)
        return self.engine.name(self.path, name)

    def order_id(self, request: EtcdRequest) -> int:
        """Return the order id of a request, which is also the fencing token."""
        return self.engine.base + request.created
