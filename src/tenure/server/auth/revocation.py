"""Certificate revocation lists of authorities.

OpenSSL checks a list while it verifies a handshake. Open connections are checked here, by the
issuer and serial number of their certificates. The lists are the administrator's files, so only
OpenSSL checks their signatures.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeAlias

from tenure.errors import InvalidArgument

CertificateId: TypeAlias = tuple[bytes, bytes]
"""Issuer and serial number of a certificate, as their DER encodings."""

_INTEGER, _SEQUENCE, _VERSION = 0x02, 0x30, 0xA0
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RevocationLists:
    """Content of a file of revocation lists.

    Attributes:
        revoked: the revoked certificates.
        ends: the time at which the first of them expires. From then on OpenSSL rejects every client
            of its authority.
    """

    revoked: frozenset[CertificateId]
    ends: datetime | None


def read_revoked(path: str) -> RevocationLists:
    """Read the revocation lists of a PEM file.

    Raises:
        InvalidArgument: the file cannot be read, contains no list, or contains other objects.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            blocks = _BLOCK.findall(file.read())
    except OSError as error:
        raise InvalidArgument(
            f"the revocation list {path} cannot be read: {error.strerror}"
        ) from None
    if not blocks or any(label != "X509 CRL" for label, _ in blocks):
        raise InvalidArgument(
            f"the revocation list {path} contains "
            + ("other objects than revocation lists" if blocks else "no list in PEM form")
            + "; convert one with 'openssl crl -inform DER -in FILE'"
        )
    revoked: set[CertificateId] = set()
    ends: list[datetime] = []
    for _, body in blocks:
        try:
            entries, end = _parse(_decode(body))
        except (ValueError, IndexError, StopIteration, RuntimeError):
            raise InvalidArgument(
                f"the revocation list {path} is damaged; see 'openssl crl -in {path} -text'"
            ) from None
        revoked.update(entries)
        ends += [] if end is None else [end]
    return RevocationLists(frozenset(revoked), min(ends, default=None))


@lru_cache(maxsize=4096)
def certificate_id(der: bytes) -> CertificateId:
    """Return the issuer and serial number of a certificate that OpenSSL has verified."""
    fields = _items(der, *_inside(der, _inside(der, (0, len(der)))))
    tag, at, end = next(fields)
    if tag == _VERSION:
        tag, at, end = next(fields)
    serial = der[at:end]
    next(fields)  # the algorithm of the signature
    _, at, end = next(fields)
    return der[at:end], serial


def _parse(der: bytes) -> tuple[list[CertificateId], datetime | None]:
    """Return the certificates that a list revokes, and the date of the next list."""
    fields = _items(der, *_inside(der, _inside(der, (0, len(der)))))
    tag, at, end = next(fields)
    if tag == _INTEGER:
        next(fields)  # the algorithm, behind a version
    _, at, end = next(fields)
    issuer = der[at:end]
    next(fields)  # date of the list
    due = None
    for tag, at, end in fields:
        if tag in _TIMES:
            due = datetime.strptime(der[at:end].decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)
        elif tag == _SEQUENCE:
            entries = (next(_items(der, *entry)) for _, *entry in _items(der, at, end))
            return [(issuer, der[serial:serial_end]) for _, serial, serial_end in entries], due
        else:
            break
    return [], due


def _decode(body: str) -> bytes:
    pem = f"{ssl.PEM_HEADER}\n{body.strip()}\n{ssl.PEM_FOOTER}"
    return ssl.PEM_cert_to_DER_cert(pem)


# DER: tag, length, content


def _items(der: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the tag of each item, and the start and end of its content."""
    while at < end:
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        if at + length > end:
            raise ValueError("an item is longer than what contains it")
        yield tag, at, at + length
        at += length


def _inside(der: bytes, place: tuple[int, int]) -> tuple[int, int]:
    """Return the position of the content of the sequence that starts there."""
    for tag, at, end in _items(der, *place):
        if tag == _SEQUENCE:
            return at, end
        break
    raise ValueError("not a sequence")
