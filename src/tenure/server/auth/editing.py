"""Changes of a file of named tokens.

A change is atomic: it writes a new file beside the old one, with mode 0600 or what the old file
had, and renames it. Two changes at a time wait for each other, by a lock on the folder. Comments
and everything else in the file stay as they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime

from tenure.errors import InvalidArgument
from tenure.server.auth.permissions import Permissions
from tenure.server.auth.tokens import Credentials, check_name, hash_of, parse_tokens

__all__ = ["add_token", "revoke_token"]

_OPENING = """\
# Tokens of 'tenure serve --auth-token-file', written by 'tenure token'.
# Reload the server after a change: SIGHUP, 'systemctl reload'.
[tokens]
"""
_SECRET_BYTES = 32


def add_token(
    path: str, name: str, permissions: Mapping[str, str] | None, expires: datetime | None = None
) -> str:
    """Add a token to a file, which is created if it is missing, and return its secret.

    Args:
        permissions: a level for each prefix; ``None`` allows everything.

    Raises:
        InvalidArgument: the file cannot be changed, or has the token already.
    """
    check_name(name, "NAME")
    Permissions.parse(permissions)
    secret = "tenure_" + secrets.token_urlsafe(_SECRET_BYTES)
    lines = [f"[tokens.{_key(name)}]", f'hash = "{hash_of(secret)}"']
    if expires is not None:
        lines.append(f"expires = {expires:%Y-%m-%dT%H:%M:%SZ}")
    if permissions is not None:
        rules = ", ".join(f"{_text(prefix)} = {_text(to)}" for prefix, to in permissions.items())
        lines.append(f"permissions = {{{rules}}}")
    with _changing(path) as change:
        if name in change.names:
            raise InvalidArgument(
                f"{path} has a token {name} already; revoke it first, or choose another name"
            )
        text = change.text if change.text.strip() else _OPENING
        change.text = f"{text.rstrip()}\n\n" + "\n".join(lines) + "\n"
        change.expect(change.names | {name})
    return secret


def revoke_token(path: str, name: str) -> None:
    """Remove a token from a file.

    Raises:
        InvalidArgument: the file cannot be changed, or has no such token.
    """
    with _changing(path) as change:
        if name not in change.names:
            known = ", ".join(sorted(change.names)) or "none"
            raise InvalidArgument(f"{path} has no token {name}; it has: {known}")
        change.text = _without(change.text, name)
        change.expect(change.names - {name})


class _Change:
    """A file that is being changed.

    Attributes:
        text: its new content.
        names: of the tokens in its old content.
    """

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self.text = text
        found = parse_tokens(text, path) if text.strip() else Credentials(named=True)
        if not found.named:
            raise InvalidArgument(
                f"{path} has plain tokens, one on each line, and these have no names; give named "
                "tokens a file of their own (docs/server.md says how to move tokens there)"
            )
        self.names = {token.name for token in found.tokens}

    def expect(self, names: set[str]) -> None:
        """Check that the new content has exactly these tokens."""
        try:
            found = parse_tokens(self.text, self._path)
            same = found.named and {token.name for token in found.tokens} == names
        except InvalidArgument:
            same = False
        if not same:
            raise InvalidArgument(
                f"{self._path} is written in a way that this command cannot change; edit it by hand"
            )


@contextlib.contextmanager
def _changing(path: str) -> Iterator[_Change]:
    """Read a file, and write it when the block ends without an error."""
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = _stat(path)
            change = _Change(path, _read(path) if before is not None else "")
            yield change
            _write(path, change.text, before)
            os.fsync(lock)
        finally:
            os.close(lock)
    except OSError as error:
        raise InvalidArgument(
            f"the token file {path} cannot be changed: {error.strerror}"
        ) from error


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read()


def _write(path: str, text: str, before: os.stat_result | None) -> None:
    number, temporary = tempfile.mkstemp(prefix=".tokens-", dir=os.path.dirname(path))
    try:
        with open(number, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            if before is not None:
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(number, before.st_uid, before.st_gid)
                os.fchmod(number, stat.S_IMODE(before.st_mode) & 0o640)
            file.write(text)
            file.flush()
            os.fsync(number)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _key(name: str) -> str:
    return name if "." not in name else _text(name)


def _text(text: str) -> str:
    """Quote a text for TOML, whose basic strings include those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _without(text: str, name: str) -> str:
    """Remove the tables of one token from the text, with what belongs to them."""
    names = {re.escape(name), re.escape(_text(name)), re.escape(f"'{name}'")}
    own = re.compile(rf"\s*\[\s*tokens\s*\.\s*(?:{'|'.join(names)})\s*[.\]]")
    kept: list[str] = []
    before_next: list[str] = []  # comments that may belong to the next table
    inside = False
    for line in text.splitlines(keepends=True):
        start = line.lstrip()
        if start.startswith("["):
            if inside:
                kept += before_next
            inside = own.match(line) is not None
            before_next = []
        if not inside:
            kept.append(line)
        elif start.startswith("#"):
            before_next.append(line)
        elif start:
            before_next = []
    return "".join(kept)
