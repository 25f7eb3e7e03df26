"""Tokens, resource names and rejections, shared by all fences.

* A token is checked before anything is sent: an invalid token raises `InvalidArgument`, and is
  never compared.
"""

from __future__ import annotations

from typing import Protocol

from tenure.errors import InvalidArgument, StaleToken

__all__ = ["TOKENS_END", "Fenced", "Token", "name_of", "stale", "token_of"]

TOKENS_END = 2**53
"""Upper bound, exclusive, of tokens: integers below it are exact in SQL, Lua and JSON."""

_LONGEST_NAME = 255  # characters: the longest primary key that every database accepts


class Fenced(Protocol):
    """Object with a fencing token: a lease or a leadership of `tenure` or `tenure.blocking`."""

    @property
    def fencing_token(self) -> int:
        """Fencing token, which rises with every grant in the store."""
        ...


Token = int | Fenced


def token_of(token: Token) -> int:
    """Return the number of a token, or of a lease.

    Raises:
        InvalidArgument: it is neither, or the number is not from 0 to 2^53 - 1.
        Unsupported: the store of the lease has no tokens.
    """
    number = token if isinstance(token, int) else getattr(token, "fencing_token", None)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidArgument(f"a fencing token is an int, or a lease that has one, not {token!r}")
    if not 0 <= number < TOKENS_END:
        raise InvalidArgument(f"a fencing token is from 0 to 2^53 - 1, not {number}")
    return number


def name_of(resource: str) -> str:
    """Check and return the name of a resource.

    Raises:
        InvalidArgument: it is not a name of 1 to 255 characters, or contains a NUL.
    """
    if not isinstance(resource, str):
        raise InvalidArgument(f"a resource is named by a str, not {resource!r}")
    if not 1 <= len(resource) <= _LONGEST_NAME or "\0" in resource:
        raise InvalidArgument(
            f"a resource's name has 1 to {_LONGEST_NAME} characters, and no NUL: not {resource!r}"
        )
    return resource


def stale(resource: str, token: int, newest: int | None) -> StaleToken:
    """Return the error for a stale token; `newest` is ``None`` if unknown."""
    newer = "a newer token" if newest is None else f"token {newest}"
    return StaleToken(
        f"the write to {resource!r} with fencing token {token} was refused: {newer} has been used "
        f"since, so the lease of {token} has ended. Undo this write, and acquire again",
        resource=resource,
        token=token,
        newest=newest,
    )
