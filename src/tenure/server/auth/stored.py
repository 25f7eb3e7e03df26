"""Count of the nodes and semaphores' data that this server's clients have stored.

Both are counted from their creation by a client of this server. The store does not record the
identity of their creators, because every engine would have to, and other programs may write there,
too. So objects that a server finds at its start belong to `Accounts.unowned`: they count against
the server's limits, but against no identity's quota.

Rules for the data of one semaphore:

* A write is charged before it is sent. When the store confirms it, the charges for the data that
  existed when the write began are released.
* A write that the store rejects is released.
* A write without an answer (its caller was cancelled, or failed unexpectedly) may have taken
  effect. It stays charged, in addition to the previous data, until a later write or deletion is
  confirmed, the node is dropped, or the data is read again (`unanswered`, `read`). An account is
  charged for at most one such write of a semaphore, the largest.
"""

from __future__ import annotations

from collections.abc import Collection

from tenure.server.auth.accounts import Account


class Write:
    """One write of a semaphore's data.

    Attributes:
        account: the charged account.
        size: the charged bytes.
        under_way: whether the write is still in progress.
        unanswered_at: the time at which its caller abandoned it; ``None``: it has an answer.
    """

    __slots__ = ("account", "name", "node", "size", "unanswered_at", "under_way")

    def __init__(self, node: str, name: str, account: Account, size: int) -> None:
        self.node = node
        self.name = name
        self.account = account
        self.size = size
        self.under_way = True
        self.unanswered_at: float | None = None


class Stored:
    """Nodes and semaphores' data that this server's clients have stored.

    Attributes:
        nodes: accounts by the paths of their nodes.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Account] = {}
        self._new_nodes: set[str] = set()  # created while the store's nodes are listed
        self._writes: dict[str, dict[str, list[Write]]] = {}  # by node, by name; oldest first
        self._unanswered: dict[Write, None] = {}  # oldest first

    # Data

    @property
    def without_answer(self) -> int:
        """Number of writes with an unknown outcome."""
        return len(self._unanswered)

    def found(self, node: str, name: str, account: Account, size: int) -> None:
        """Charge an account for the existing data of a semaphore, unless it is known."""
        if size and name not in self._writes.get(node, ()):
            account.stored_bytes.take_anyway(size)
            self._add(node, name, account, size).under_way = False

    def begin(self, node: str, name: str, account: Account, size: int) -> Write:
        """Charge a write to be sent. An empty write, or a deletion, is always allowed.

        Raises:
            LimitReached: the account would have too many bytes.
        """
        if size:
            account.stored_bytes.take(size, node=node, name=name)
        return self._add(node, name, account, size)

    def _add(self, node: str, name: str, account: Account, size: int) -> Write:
        write = Write(node, name, account, size)
        self._writes.setdefault(node, {}).setdefault(name, []).append(write)
        return write

    def wrote(self, write: Write) -> None:
        """Record that the store has confirmed a write."""
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
        """Record that the store has answered a creation, which may have kept the existing data."""
        others = self._writes[write.node][write.name]
        before = [each for each in others if each is not write and not each.under_way]
        if any(each.unanswered_at is not None for each in before):
            self.abandoned(write, now)  # the previous data is not known either
        elif before:
            self._remove(write)
        else:
            self.wrote(write)

    def refused(self, write: Write) -> None:
        """Record that the store has rejected a write."""
        self._remove(write)

    def abandoned(self, write: Write, now: float) -> None:
        """Record that a write may have taken effect, and will have no answer."""
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
        """Return the writes of semaphores that should be read again.

        Args:
            before: only writes abandoned before this time, which have certainly ended.
            most: maximum number of semaphores.
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
        """Record the size of the store's data, after a list of writes from `unanswered`.

        Does nothing if there was another write meanwhile. Data of another size than those writes
        was written through another server.
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
        """Record that a semaphore was deleted."""
        for each in list(self._writes.get(node, {}).get(name, ())):
            if not each.under_way:
                self._remove(each)

    def _remove(self, write: Write) -> None:
        """Release the charge of a write."""
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
        """Charge an account for an existing node, unless it is known."""
        if node not in self.nodes:
            account.nodes.take_anyway()
            self.nodes[node] = account

    def created(self, node: str, account: Account) -> None:
        """Record that an account has created a node, which is already counted."""
        self.dropped(node)
        self.nodes[node] = account
        self._new_nodes.add(node)

    def may_have_created(self, node: str, account: Account) -> None:
        """Record that an account may have created a node, which is already counted."""
        if node in self.nodes:
            account.nodes.release()  # it is counted there while it exists
        else:
            self.nodes[node] = account
            self._new_nodes.add(node)

    def dropped(self, node: str) -> None:
        """Record that a node was dropped, with its semaphores."""
        account = self.nodes.pop(node, None)
        self._new_nodes.discard(node)
        if account is not None:
            account.nodes.release()
        for name in list(self._writes.get(node, ())):
            self.deleted(node, name)

    def begin_list(self) -> None:
        """Record the nodes created from now on: the list may be older."""
        self._new_nodes.clear()

    def forget_missing(self, nodes: Collection[str]) -> None:
        """Uncount nodes that are not in a list of the store's nodes."""
        for node in {*self.nodes, *self._writes} - set(nodes) - self._new_nodes:
            self.dropped(node)
