"""A session: everything that a program holds is held through one.

The session's state is in `session_core`, and `session_states` has the diagram.
"""

from __future__ import annotations

from tenure._client.election import Election
from tenure._client.mutex import Mutex
from tenure._client.runs import Jobs
from tenure._client.semaphore import Semaphore
from tenure._client.session_core import SessionCore
from tenure._client.session_handle import SessionHandle

__all__ = ["Session"]


class Session(Jobs, SessionHandle):
    """A program's session on a node. `Client.session` makes one.

    ``async with client.session(...) as session`` closes it at the end of the block, and cancels
    the body when it expires; the block then raises `SessionExpired`. A session that was awaited
    is closed with `aclose`.

    Attributes:
        node: the path of its node.
        recovery_window: seconds it survives without contact to the store.
        max_stall: seconds that the event loop may be stuck before it is no longer renewed.
    """

    def mutex(self, name: str) -> Mutex:
        """The mutex of that name on the session's node."""
        return Mutex(self._core, name)

    def semaphore(self, name: str, *, ephemeral: bool = False) -> Semaphore:
        """The semaphore of that name on the session's node.

        Args:
            ephemeral: it comes and goes with its requests, and needs no creation.
        """
        return Semaphore(self._core, name, ephemeral=ephemeral)

    def election(self, name: str) -> Election:
        """The election of that name on the session's node."""
        return Election(self._core, name)

    # For the primitives

    def _source(self) -> SessionCore:
        return self._core
