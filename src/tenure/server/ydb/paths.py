"""Paths of tenure's nodes in YDB.

The node ``/my-app`` is ``/local/my-app`` in the database ``/local``.
"""

from __future__ import annotations

from tenure.core import rules

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
