"""Identity of a client, for permissions, quotas and the audit log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tenure.server.auth.permissions import EVERYTHING, Permissions
from tenure.server.auth.quotas import UNSET, Quotas

IdentityKind: TypeAlias = Literal["token", "certificate", "uid", "anonymous"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of one or several connections.

    Attributes:
        name: the name in the log: a token's name, or its line in a file of plain tokens; the
            subject of a client certificate; ``uid 1000`` for a Unix peer; ``anonymous``.
        kind: the credential that established it.
        credential: digest of the token; empty for the other kinds. It identifies the token after a
            reload, and is not a secret: the key of the digest never leaves the process.
        permissions: its access to nodes.
        quotas: its maximum usage.
        group: the owner of its sessions, if it is not the identity itself: plain tokens have no
            names, and sessions survive the replacement of a token.
    """

    name: str
    kind: IdentityKind
    credential: bytes = field(default=b"", repr=False, compare=False)
    permissions: Permissions = field(default=EVERYTHING, repr=False, compare=False)
    quotas: Quotas = field(default=UNSET, repr=False, compare=False)
    group: str = field(default="", repr=False, compare=False)

    @property
    def owner(self) -> str:
        """Name under which its sessions and its usage are recorded."""
        return f"{self.kind} {self.group or self.name}"

    def __str__(self) -> str:
        """Return the name, for the log."""
        return self.name


ANONYMOUS = Identity("anonymous", "anonymous")
"""Identity of clients without credentials, where none are required."""

PLAIN = "plain tokens"
"""Group of all tokens without names. (A name contains no space.)"""
