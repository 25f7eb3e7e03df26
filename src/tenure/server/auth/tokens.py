"""Token files: one plain token on each line.

A line that starts with ``#`` is a comment. Several tokens at a time let an administrator hand out a
new one before the old one is removed. No message contains a token.
"""

from __future__ import annotations

import os
import stat

from tenure.errors import InvalidArgument

__all__ = ["LONGEST", "SHORTEST", "read_tokens", "readable_by_others"]

SHORTEST = 16
"""Characters of the shortest token that is taken: what is shorter is soon guessed."""

LONGEST = 4096
"""Characters of the longest."""


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
