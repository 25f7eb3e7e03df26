"""Token files, in two formats.

* **Plain**: one token on each line; a line that starts with ``#`` is a comment. The name of an
  identity is its line number.
* **TOML**: named tokens, and permissions of certificates and Unix users::

      [tokens.billing]
      hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
      expires = 2027-01-01T00:00:00Z
      permissions = {"/billing" = "hold", "/shared" = "read"}  # of all hashes, if there are several
      quotas = {sessions = 100}

      [certificates."CN=reports,O=Example"]
      permissions = {"/" = "read"}

      [uids.1000]

The file contains a hash of each named token, so a copy of the file gives no access. One round of
SHA-256 without a salt is enough here, unlike for passwords: ``tenure token new`` generates 256
random bits, which no attacker can enumerate, with or without a table of hashes.

No message contains a token.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tenure.errors import InvalidArgument
from tenure.server.auth.identity import EVERYTHING, UNSET, Permissions, Quotas

SHORTEST = 16
"""Minimum length of a plain token: a shorter one is easily guessed."""

LONGEST = 4096
"""Maximum length of a plain token."""

_SCHEME = "sha256:"
_UID_DIGITS = 10
_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TABLE = re.compile(r"^\s*\[\s*(tokens|certificates|uids)\s*[.\]]", re.MULTILINE)
_TABLES = ("tokens", "certificates", "uids")


@dataclass(frozen=True, slots=True)
class Rights:
    """Permissions and quotas of one identity."""

    permissions: Permissions = EVERYTHING
    quotas: Quotas = UNSET


_ALL_RIGHTS = Rights()


@dataclass(frozen=True, slots=True)
class Token:
    """A valid token.

    Attributes:
        name: the name of its identity.
        digest: SHA-256 of the token.
        rights: the rights of its identity.
        expires: the end of its validity; ``None``: never.
        unnamed: whether the name is a line number, because the file has no names.
    """

    name: str
    digest: bytes = field(repr=False)
    rights: Rights = _ALL_RIGHTS
    expires: datetime | None = None
    unnamed: bool = False

    def is_expired(self, now: datetime) -> bool:
        """Return true if it is no longer valid."""
        return self.expires is not None and self.expires <= now

    @classmethod
    def plain(cls, token: str, name: str) -> Token:
        """Return a token from its text."""
        return cls(name, _digest(token))


@dataclass(frozen=True, slots=True)
class Credentials:
    """Content of a token file.

    Attributes:
        tokens: the valid tokens.
        certificates: rights by the subject of a client certificate; such a client needs no token.
        uids: rights by the uid of a Unix peer; such a client needs no token.
        named: whether the file is TOML.
    """

    tokens: tuple[Token, ...] = ()
    certificates: Mapping[str, Rights] = field(default_factory=dict)
    uids: Mapping[int, Rights] = field(default_factory=dict)
    named: bool = False

    def shut_out(self, now: datetime) -> str | None:
        """Return why no client could use a server with them; ``None`` if one could."""
        lasting = [*self.certificates.values(), *self.uids.values()]
        valid = [each.rights for each in self.tokens if not each.is_expired(now)]
        if not lasting and not valid:
            return "has no token" if not self.tokens else "has only tokens that have expired"
        if not any(each.permissions.usable for each in (*lasting, *valid)):
            return "gives no permission to use a node"
        return None


def hash_of(token: str) -> str:
    """Return the hash of a token, in the form of the file."""
    return written_hash(_digest(token))


def written_hash(digest: bytes) -> str:
    """Return a digest in the form of the file."""
    return _SCHEME + digest.hex()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def read_tokens(path: str) -> Credentials:
    """Read a token file.

    Raises:
        InvalidArgument: it cannot be read, contains no token, or contains an invalid one.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except OSError as error:
        raise InvalidArgument(f"the token file {path} cannot be read: {error.strerror}") from None
    return parse_tokens(text, path)


def parse_tokens(text: str, path: str) -> Credentials:
    """Read the text of a token file.

    Args:
        text: the text.
        path: the path of the file, for messages.

    Raises:
        InvalidArgument: see `read_tokens`.
    """
    if _TABLE.search(text):
        return _parse_named(text, path)
    return Credentials(tuple(_parse_plain(text, path)))


# Plain tokens


def _parse_plain(text: str, path: str) -> list[Token]:
    tokens: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
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
            f"the token file {path} has no token; make one with 'tenure token new NAME --file "
            f"{path}', or leave the file out to let every client in"
        )
    return [
        Token(f"line {number}", _digest(token), unnamed=True) for token, number in tokens.items()
    ]


def _fault(token: str) -> str | None:
    """Describe what is wrong with a token, without showing it."""
    if len(token) < SHORTEST:
        return f"has {len(token)} characters, and fewer than {SHORTEST} are easily guessed"
    if len(token) > LONGEST:
        return f"has {len(token)} characters, more than {LONGEST}"
    if not token.isascii() or not token.isprintable() or " " in token:
        return "has a character other than the printable ones of ASCII, or a space"
    return None


# Named tokens


def _parse_named(text: str, path: str) -> Credentials:
    try:
        read = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also from endless numbers and lists
        raise InvalidArgument(f"the token file {path} is not TOML: {error}") from None
    for key, value in read.items():
        if key not in _TABLES:
            raise InvalidArgument(
                f"{path}: there is no table {key!r} in a token file; there are {', '.join(_TABLES)}"
            )
        if not isinstance(value, dict):
            raise InvalidArgument(f"{path}: {key} is a table, [{key}.NAME]")
    tokens: dict[bytes, Token] = {}
    for name, entry in read.get("tokens", {}).items():
        for token in _tokens(name, entry, f"{path}: [tokens.{name}]"):
            if token.digest in tokens:
                raise InvalidArgument(
                    f"{path}: [tokens.{name}] has the hash of [tokens.{tokens[token.digest].name}]"
                )
            tokens[token.digest] = token
    certificates = {
        subject: _rights(entry, f"{path}: [certificates.{subject!r}]")
        for subject, entry in read.get("certificates", {}).items()
    }
    uids: dict[int, Rights] = {}
    for uid, entry in read.get("uids", {}).items():
        if not (uid.isascii() and uid.isdecimal() and len(uid) <= _UID_DIGITS):
            raise InvalidArgument(f"{path}: [uids.{uid}]: a uid is a number")
        uids[int(uid)] = _rights(entry, f"{path}: [uids.{uid}]")
    return Credentials(tuple(tokens.values()), certificates, uids, named=True)


def _tokens(name: str, entry: object, where: str) -> list[Token]:
    check_name(name, where)
    rights = _rights(entry, where, extra=("hash", "expires"))
    assert isinstance(entry, dict)
    given = entry.get("hash")
    digests = [_read_hash(each, where) for each in (given if isinstance(given, list) else [given])]
    if not digests:
        raise InvalidArgument(f"{where}: hash is an empty list")
    expires = entry.get("expires")
    if expires is not None and not isinstance(expires, datetime):
        raise InvalidArgument(f"{where}: expires is a moment like 2027-01-01T00:00:00Z")
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return [Token(name, each, rights, expires) for each in digests]


def _read_hash(given: object, where: str) -> bytes:
    if not isinstance(given, str) or not given.startswith(_SCHEME):
        raise InvalidArgument(f"{where}: hash is missing; it is the text 'sha256:' and 64 digits")
    digits = given.removeprefix(_SCHEME)
    if not _HASH.fullmatch(digits):
        raise InvalidArgument(f"{where}: hash is 'sha256:' and 64 hexadecimal digits in lower case")
    return bytes.fromhex(digits)


def _rights(entry: object, where: str, extra: tuple[str, ...] = ()) -> Rights:
    known = (*extra, "permissions", "quotas")
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where} is a table")
    for key in entry:
        if key not in known:
            raise InvalidArgument(f"{where}: there is no {key!r}; there are {', '.join(known)}")
    for key in ("permissions", "quotas"):
        if key in entry and not isinstance(entry[key], dict):
            raise InvalidArgument(f"{where}: {key} is a table")
    table: dict[str, Any] = entry
    return Rights(
        Permissions.parse(table.get("permissions"), where=where),
        Quotas.parse(table.get("quotas"), where=where),
    )


def check_name(name: str, where: str) -> None:
    """Check the name of a token.

    Raises:
        InvalidArgument: it is not a valid name.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{where}: a token's name is 1 to 64 letters, digits, '.', '_' and '-', and begins "
            "with a letter or a digit"
        )


def readable_by_others(path: str) -> str | None:
    """Describe the access of other users to a secret file; ``None`` if they have none."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & stat.S_IROTH:
        return f"everybody may read {path} (mode {mode:04o}); chmod 600 {path}"
    if mode & stat.S_IWGRP or mode & stat.S_IWOTH:
        return f"others may write {path} (mode {mode:04o}); chmod 600 {path}"
    return None
