"""Which tokens open the server.

Tokens stand in a file, one a line; a line that starts with ``#`` is a comment. Several at a time
let a new one be handed out before the old one goes. What is compared are keyed digests, all of
them each time, so that the time it takes tells nothing. No message and no `repr` has a token in it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping

from tenure.errors import AuthenticationFailed, InvalidArgument

__all__ = ["LONGEST", "SHORTEST", "Authenticator", "read_tokens", "readable_by_others"]

SHORTEST = 16
"""Characters of the shortest token that is taken: what is shorter is soon guessed."""

LONGEST = 4096
"""Characters of the longest."""


class Authenticator:
    """Says whose token it is that a client shows. Without tokens, everybody is let in.

    Args:
        tokens: the right ones, with what the log calls whoever has one.
    """

    def __init__(self, tokens: Mapping[str, str] | None = None) -> None:
        self._key = secrets.token_bytes(32)
        self._known: tuple[tuple[bytes, str], ...] = ()
        self.replace(tokens or {})

    def __repr__(self) -> str:
        return f"<Authenticator with {len(self._known)} tokens>"

    def __len__(self) -> int:
        """How many tokens are right."""
        return len(self._known)

    @property
    def required(self) -> bool:
        """Whether a client has to show a token."""
        return bool(self._known)

    def replace(self, tokens: Mapping[str, str]) -> None:
        """From now on these are the right ones; who has been let in stays."""
        self._known = tuple((self._digest(token), whose) for token, whose in tokens.items())

    def authenticate(self, token: str) -> str:
        """Whose token it is; empty where none is required.

        Raises:
            AuthenticationFailed: it is none of those that are known here.
        """
        if not self._known:
            return ""
        shown = self._digest(token)
        found = None
        for digest, whose in self._known:  # all of them, so that the time does not tell which
            if hmac.compare_digest(digest, shown):
                found = whose
        if found is None:
            raise AuthenticationFailed(
                "the server does not know this token; ask whoever runs it for a right one"
                if token
                else "the server lets nobody in without a token; ask whoever runs it for one"
            )
        return found

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode(errors="surrogatepass"), "sha256")


def read_tokens(path: str) -> dict[str, str]:
    """The tokens of a file, each with the place where it stands.

    Raises:
        InvalidArgument: it cannot be read, has no token, or has what cannot be one.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise InvalidArgument(f"the token file {path} cannot be read: {error.strerror}") from None
    tokens: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        fault = _fault(token)
        if fault is None and token in tokens:
            fault = f"is that of line {tokens[token]} again"
        if fault is not None:
            raise InvalidArgument(f"{path}, line {number}: the token {fault}")
        tokens[token] = number
    if not tokens:
        raise InvalidArgument(
            f"the token file {path} has no token; write one a line, made for example with "
            "'openssl rand -hex 32', or leave the file out to let everybody in"
        )
    return {token: f"line {number}" for token, number in tokens.items()}


def _fault(token: str) -> str | None:
    """What is wrong with a token, without saying what it is."""
    if len(token) < SHORTEST:
        return f"has {len(token)} characters, and fewer than {SHORTEST} are soon guessed"
    if len(token) > LONGEST:
        return f"has {len(token)} characters, more than {LONGEST}"
    if not token.isascii() or not token.isprintable() or " " in token:
        return "has a character other than the printable ones of ASCII, or a space"
    return None


def readable_by_others(path: str) -> str | None:
    """Who else may read a file that holds a secret, in words; ``None`` when nobody may."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & stat.S_IROTH:
        return f"everybody may read {path} (mode {mode:04o}); chmod 600 {path}"
    if mode & stat.S_IWGRP or mode & stat.S_IWOTH:
        return f"others may write {path} (mode {mode:04o}); chmod 600 {path}"
    return None
