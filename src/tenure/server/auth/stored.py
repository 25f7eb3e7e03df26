"""Count of the nodes and of the semaphores' data that this server's clients have stored.

Both count from the time at which a client of this server made them. The store does not record which
identity made something: it would have to for every engine, and other programs may write there too.
What a server finds at its start therefore belongs to `Accounts.unowned`. It counts against the
server's limits, so that no restart makes room, and against no identity's quota.

Rules for the data of one semaphore:

* A write is charged from before it is sent. A write that the store confirms replaces the data
  that was there when the write began, and all but the confirmed one are released.
* A write that the store refuses is released.
* A write without an answer (its caller was cancelled, or failed unexpectedly) may have taken place:
  it stays charged, beside what was there before, until a later write or deletion is confirmed, the
  node is dropped, or the data is read again (`unanswered`, `read`). One account is charged for at
  most one such write of a semaphore, the largest.
"""

from __future__ import annotations

from collections.abc import Collection

from tenure.server.auth.accounts import Account

__all__ = ["Stored", "Write"]


class Write:
    """One write of a semaphore's data.

    Attributes:
        account: the one that is charged.
        size: the bytes that are charged.
        under_way: the write has neither an answer nor failed.
        unanswered_at: the time at which its caller abandoned it; ``None``: there is an answer.
    """

    __slots__ = ("account", "name", "node", "size", "unanswered_at", "under_way")

    def __init__(self, node: str, name: str, account: Account, size: int) -> None:
        """Start under way."""
        self.node = node
        self.name = name
        self.account = account
        self.size = size
        self.under_way = True
        self.unanswered_at: float | None = None


class Stored:
    """The nodes and the data of semaphores that this server's clients have made.

    Attributes:
        nodes: accounts by the paths of their nodes.
    """

    def __init__(self) -> None:
        """Start with nothing counted."""
        self.nodes: dict[str, Account] = {}
        self._new_nodes: set[str] = set()  # made while the store's nodes are listed
        self._writes: dict[str, dict[str, list[Write]]] = {}  # by node, by name; oldest first
        self._unanswered: dict[Write, None] = {}  # oldest first

    # Data

    @property
    def without_answer(self) -> int:
        """Number of writes of which it is not known whether they took place."""
        return len(self._unanswered)

    def found(self, node: str, name: str, account: Account, size: int) -> None:
        """Charge an account for the data that a semaphore had before, unless it is known."""
        if size and name not in self._writes.get(node, ()):
            account.stored_bytes.take_anyway(size)
            self._add(node, name, account, size).under_way = False

    def begin(self, node: str, name: str, account: Account, size: int) -> Write:
        """Charge a write that is about to be sent. One of no bytes, or a deletion, always may be.

        Raises:
            LimitReached: the account has too many bytes.
        """
        if size:
            account.stored_bytes.take(size, node=node, name=name)
        return self._add(node, name, account, size)

    def _add(self, node: str, name: str, account: Account, size: int) -> Write:
        write = Write(node, name, account, size)
        self._writes.setdefault(node, {}).setdefault(name, []).append(write)
        return write

    def wrote(self, write: Write) -> None:
        """Note that the store has confirmed a write."""
        write.under_way = False
        writes = self._writes[write.node][write.name]
        position = writes.index(write)
        for number, each in enumerate(list(writes)):
            later = number > position and each.unanswered_at is not None
            if not (each is write or each.under_way or later):
                self._remove(each)
        if not write.size:
            self._remove(write)

    def kept(self, write: Write, now: float) -> None:
        """Note that the store has answered a creation, and may have left the data as it was."""
        others = self._writes[write.node][write.name]
        before = [each for each in others if each is not write and not each.under_way]
        if any(each.unanswered_at is not None for each in before):
            self.abandoned(write, now)  # what the data was before is not known either
        elif before:
            self._remove(write)
        else:
            self.wrote(write)

    def refused(self, write: Write) -> None:
        """Note that the store has refused a write."""
        self._remove(write)

    def abandoned(self, write: Write, now: float) -> None:
        """Note that a write may have taken place, and that there will be no answer."""
        write.under_way = False
        write.unanswered_at = now
        self._unanswered[write] = None
        for each in list(self._writes[write.node][write.name]):
            if each is not write and each.account is write.account and each in self._unanswered:
                write.size, each.size = max(write.size, each.size), min(write.size, each.size)
                self._remove(each)
        if len(self._writes[write.node][write.name]) == 1 and not write.size:
            self._remove(write)

    def unanswered(self, before: float, most: int) -> list[tuple[Write, ...]]:
        """Return all writes of semaphores that are worth reading again.

        Args:
            before: the time before which a write was abandoned, so that it has come to its end.
            most: the number of semaphores.
        """
        found: dict[tuple[Write, ...], None] = {}
        for each in self._unanswered:
            assert each.unanswered_at is not None
            if each.unanswered_at > before or len(found) == most:
                break
            writes = self._writes[each.node][each.name]
            if not any(other.under_way for other in writes):
                found[tuple(writes)] = None
        return list(found)

    def read(self, writes: tuple[Write, ...], size: int) -> None:
        """Note how much data the store has, after a list of writes that `unanswered` returned.

        Nothing happens if there was another write meanwhile. Data of a size that none of them
        accounts for was written through another server.
        """
        node, name = writes[0].node, writes[0].name
        if tuple(self._writes.get(node, {}).get(name, ())) != writes:
            return
        newest_first = writes[::-1]
        fitting = [each for each in newest_first if each.size == size] or [
            each for each in newest_first if each.size > size > 0
        ]
        for each in writes:
            if each not in fitting[:1] or not size:
                self._remove(each)
        if fitting and size:
            kept = fitting[0]
            kept.account.stored_bytes.release(kept.size - size)
            kept.size = size
            kept.unanswered_at = None
            self._unanswered.pop(kept, None)

    def deleted(self, node: str, name: str) -> None:
        """Note that a semaphore was deleted."""
        for each in list(self._writes.get(node, {}).get(name, ())):
            if not each.under_way:
                self._remove(each)

    def _remove(self, write: Write) -> None:
        """Charge a write no more."""
        names = self._writes[write.node]
        writes = names[write.name]
        writes.remove(write)
        self._unanswered.pop(write, None)
        write.account.stored_bytes.release(write.size)
        if not writes:
            del names[write.name]
            if not names:
                del self._writes[write.node]

    # Nodes

    def found_node(self, node: str, account: Account) -> None:
        """Charge an account for a node that was there before, unless it is known."""
        if node not in self.nodes:
            account.nodes.take_anyway()
            self.nodes[node] = account

    def created(self, node: str, account: Account) -> None:
        """Note that an account has created a node, which is counted already."""
        self.dropped(node)
        self.nodes[node] = account
        self._new_nodes.add(node)

    def may_have_created(self, node: str, account: Account) -> None:
        """Note that an account may have created a node, which is counted already."""
        if node in self.nodes:
            account.nodes.release()  # it is counted there as long as it exists
        else:
            self.nodes[node] = account
            self._new_nodes.add(node)

    def dropped(self, node: str) -> None:
        """Note that a node was dropped, with its semaphores."""
        account = self.nodes.pop(node, None)
        self._new_nodes.discard(node)
        if account is not None:
            account.nodes.release()
        for name in list(self._writes.get(node, ())):
            self.deleted(node, name)

    def begin_list(self) -> None:
        """Remember the nodes that are made from now on: the list may be older than they are."""
        self._new_nodes.clear()

    def forget_missing(self, nodes: Collection[str]) -> None:
        """Count no node any more that is not in a list of the store's nodes."""
        for node in {*self.nodes, *self._writes} - set(nodes) - self._new_nodes:
            self.dropped(node)
