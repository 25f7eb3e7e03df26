"""Changes of a file of named tokens.

A change is atomic: it writes a new file in the same folder, with mode 0600 or that of the old file,
and renames it. A lock on the folder serialises changes. Comments and everything else in the file
are kept.
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
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from tenure.errors import InvalidArgument
from tenure.server.auth.identity import Permissions
from tenure.server.auth.tokens import (
    Credentials,
    check_name,
    hash_of,
    parse_tokens,
    written_hash,
)

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
        path: the path of the file.
        name: the token's name.
        permissions: a level for each prefix; ``None`` allows everything.
        expires: when the token becomes invalid, in UTC; never if ``None``.

    Raises:
        InvalidArgument: the file cannot be changed, or already has the token.
    """
    check_name(name, "NAME")
    Permissions.parse(permissions)
    secret = _new_secret()
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


def _new_secret() -> str:
    return "tenure_" + secrets.token_urlsafe(_SECRET_BYTES)


def revoke_token(path: str, name: str) -> None:
    """Remove a token from a file.

    Raises:
        InvalidArgument: the file cannot be changed, or has no such token.
    """
    with _changing(path) as change:
        change.hashes(name)
        change.text = _without(change.text, name)
        change.expect(change.names - {name})


def rotate_token(path: str, name: str) -> str:
    """Give a token a second secret beside its newest one, and return it.

    Raises:
        InvalidArgument: the file cannot be changed, or has no such token.
    """
    secret = _new_secret()
    _set_hashes(path, name, lambda former: [former[-1], hash_of(secret)])
    return secret


def finish_rotation(path: str, name: str) -> None:
    """Remove all but the newest secret of a token.

    Raises:
        InvalidArgument: the file cannot be changed, or has no such token.
    """
    _set_hashes(path, name, lambda former: former[-1:])


def _set_hashes(path: str, name: str, choose: Callable[[list[str]], list[str]]) -> None:
    with _changing(path) as change:
        former = change.hashes(name)
        hashes = choose(former)
        if hashes != former:
            change.text = _with_hashes(change.text, name, hashes)
            change.expect(change.names)
            if change.hashes_now(name) != hashes:
                raise change.too_clever()


class _Change:
    """A file that is being changed.

    Attributes:
        text: its new content.
        names: the names of the tokens in its old content.
    """

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self.text = text
        found = parse_tokens(text, path) if text.strip() else Credentials(named=True)
        if not found.named:
            raise InvalidArgument(
                f"{path} has plain tokens, one on each line, and these have no names; give named "
                "tokens a file of their own (docs/operate/tokens.md says how to move tokens there)"
            )
        self.names = {token.name for token in found.tokens}
        self._tokens = found.tokens

    def hashes(self, name: str) -> list[str]:
        """Return the hashes of a token in the old content."""
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            raise InvalidArgument(f"{self._path} has no token {name}; it has: {known}")
        return [written_hash(each.digest) for each in self._tokens if each.name == name]

    def hashes_now(self, name: str) -> list[str]:
        """Return the hashes of a token in the new content."""
        found = parse_tokens(self.text, self._path).tokens
        return [written_hash(each.digest) for each in found if each.name == name]

    def too_clever(self) -> InvalidArgument:
        """Return the error for a file that this module cannot change."""
        return InvalidArgument(
            f"{self._path} has a form that this command cannot change; edit it by hand"
        )

    def expect(self, names: set[str]) -> None:
        """Check that the new content has exactly these tokens."""
        try:
            found = parse_tokens(self.text, self._path)
            same = found.named and {token.name for token in found.tokens} == names
        except InvalidArgument:
            same = False
        if not same:
            raise self.too_clever()


@contextlib.contextmanager
def _changing(path: str) -> Iterator[_Change]:
    """Read a file, and write it if the block ends without an error."""
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


def _header(name: str, end: str) -> re.Pattern[str]:
    """Return a pattern for the header of a token's table."""
    names = {re.escape(name), re.escape(_text(name)), re.escape(f"'{name}'")}
    return re.compile(rf"\s*\[\s*tokens\s*\.\s*(?:{'|'.join(names)})\s*{end}")


def _with_hashes(text: str, name: str, hashes: list[str]) -> str:
    """Replace the hashes of one token in the text."""
    own = _header(name, r"\]")
    value = _text(hashes[0]) if len(hashes) == 1 else f"[{', '.join(map(_text, hashes))}]"
    lines = text.splitlines(keepends=True)
    inside = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("["):
            inside = own.match(line) is not None
        elif inside and re.match(r"\s*hash\s*=", line):
            lines[number] = f"hash = {value}\n"
    return "".join(lines)


def _without(text: str, name: str) -> str:
    """Remove the tables of one token from the text, with their content."""
    own = _header(name, r"[.\]]")
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
