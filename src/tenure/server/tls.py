"""TLS of the server: its contexts, the checks of their files, and decryption in slices.

The minimum is TLS 1.2. With a file of client authorities, a client needs a certificate that one of
them has signed, and that is not revoked. Certificates do not replace tokens.

**Slices** (`SlicedTls`): a connection decrypts a bounded part of its input in an iteration of the
loop. The event loop decrypts all received data before the connection's protocol gets any of it.
With one byte per record, or records that only change keys, this means thousands of steps; on a
closing connection, it includes everything that the client continues to send. Rules:

* The library gets one record at a time, since one call handles all records without data.
* Beyond `_SLICE`, or `_SECONDS` without data, the object reports no more data. The rest is read in
  the connection's turn (`tenure.server.budget`).
* A stranger's input is read in its turns alone. A stranger that sends much more is cut off.
* A closing connection is cut off instead of being read.
* The kernel wakes the server for a stranger's complete headers and complete records alone, so that
  single bytes cost nothing: for as many bytes as the next one still lacks, and never for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

from tenure.errors import InvalidArgument
from tenure.server.auth.accounts import read_revoked
from tenure.server.budget import FORGOTTEN, Share

NewShare: TypeAlias = Callable[[Callable[[], None], float], Share]
CutOff: TypeAlias = Callable[[], None]

RECORD_HEADER = 5  # bytes
LONGEST_RECORD = RECORD_HEADER + 16384 + 2048  # bytes
_KINDS = frozenset(range(20, 25))  # of records
_SLICE = 256  # number of records, of which each counts once more for each KiB
_SECONDS = 0.001  # that a slice takes
_LAST = 256  # records that are searched for the end of a connection

ARRIVING: ContextVar[socket.socket] = ContextVar("ARRIVING")
"""The connection whose handshake begins in this context. TLS objects get no other word of it."""


def wake_for(connection: socket.socket, size: int) -> None:
    """Let the kernel report input of so many bytes, and no less; where it cannot, any input."""
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def record_length(header: bytes) -> int:
    """Return the bytes of the record that begins so, with its header of five bytes."""
    return RECORD_HEADER + int.from_bytes(header[3:RECORD_HEADER], "big")


class SlicedTls(ssl.SSLObject):
    """TLS state of one connection. `ssl.SSLContext.sslobject_class` makes it."""

    _received: ssl.MemoryBIO  # by the transport
    _input: ssl.MemoryBIO  # of the library
    _partial = b""  # of a record that has not come whole
    _left = 0
    _ends = 0.0  # of the slice, once it has had a record without data
    _share: Share | None = None
    _cut_off: CutOff | None = None
    _connection: socket.socket | None = None  # until its client is admitted
    _least = 0  # bytes for which the kernel wakes the server

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, *args: Any, **more: Any) -> SlicedTls:
        """Make the state of a connection; called by `ssl.SSLContext.wrap_bio`."""
        given = ssl.MemoryBIO()
        made: SlicedTls = super()._create(given, *args, **more)  # type: ignore[misc]
        made.slice_input(incoming, given)
        made._connection = ARRIVING.get(None)
        return made

    def slice_input(self, received: ssl.MemoryBIO, given: ssl.MemoryBIO) -> None:
        """Pass records of the transport on to the library, in slices."""
        self._received, self._input = received, given

    def _give(self) -> bool:
        """Give the library the next record; false if there is none."""
        received, record = self._received, self._partial
        length = RECORD_HEADER
        if len(record) < RECORD_HEADER:
            record += received.read(RECORD_HEADER - len(record))
        if len(record) >= RECORD_HEADER:
            length = record_length(record)
            valid = record[0] in _KINDS and record[1] == 3 and length <= LONGEST_RECORD
            if valid and len(record) < length:
                record += received.read(length - len(record))
            if not valid or len(record) == length:  # the library refuses what is not valid
                self._partial = b""
                self._input.write(record)
                return True
        self._partial = record
        self._wake_for(length - len(record))
        return False

    def _wake_for(self, missing: int) -> None:
        if self._connection is not None and missing != self._least:
            self._least = missing
            wake_for(self._connection, missing)

    def admit(self) -> None:
        """Be woken for any input from now on: the client has identified itself."""
        self._wake_for(1)
        self._connection = None

    def do_handshake(self) -> None:
        """Continue the handshake, like `ssl.SSLObject.do_handshake`."""
        while True:
            try:
                super().do_handshake()
            except ssl.SSLWantReadError:
                if not self._give():
                    raise
            else:
                return

    def unwrap(self) -> None:
        """End TLS, like `ssl.SSLObject.unwrap`."""
        for _ in range(_LAST):
            try:
                super().unwrap()
            except ssl.SSLWantReadError:
                if not self._give():
                    raise
            else:
                return
        raise ssl.SSLWantReadError

    def read(self, *args: Any) -> Any:
        """Return the next data, like `ssl.SSLObject.read`, up to the bound.

        The protocols here have no buffers to read into.
        """
        while self._left > 0:
            given = self._give()
            try:
                data = super().read(*args)
            except ssl.SSLWantReadError:
                if not given:
                    self._begin_slice()
                    raise
                if self._is_late():
                    break
            else:
                self._left -= 1 + (len(data) >> 10)
                return data
        self._left = 0
        self._wait()
        raise ssl.SSLWantReadError

    def _begin_slice(self) -> None:
        """Allow a slice for what arrives next, unless the client is a stranger."""
        self._left = 0 if self._share is None or self._share.stranger else _SLICE
        self._ends = 0.0

    def _is_late(self) -> bool:
        now = perf_counter()
        if not self._ends:
            self._ends = now + _SECONDS
        return now >= self._ends

    def _wait(self) -> None:
        """Read on in the connection's turn."""
        share, cut_off = self._share, self._cut_off
        if share is None or cut_off is None:
            return
        if share.stranger and self._received.pending > FORGOTTEN:
            asyncio.get_running_loop().call_soon(cut_off)
        else:
            share.queue()

    def bind(self, transport: asyncio.Transport, new_share: NewShare, cut_off: CutOff) -> None:
        """Read in the turns of the connection from now on."""
        self._cut_off = cut_off
        self._share = new_share(partial(self._go_on, transport), _SECONDS)
        self._share.queue()

    def _go_on(self, transport: asyncio.Transport) -> None:
        """Make the transport read more; cut it off if it is closing and its client still sends."""
        if transport.is_closing():
            transport.abort()
            return
        self._left = _SLICE
        self._ends = 0.0
        if transport.is_reading():
            # Resuming makes it read; a protocol that has paused it resumes it.
            transport.pause_reading()
            transport.resume_reading()


def slice_tls(transport: asyncio.Transport, new_share: NewShare, cut_off: CutOff) -> SlicedTls:
    """Bound what a transport with TLS decrypts in an iteration of the loop.

    Args:
        transport: the transport, whose context is a `server_context`.
        new_share: returns a share of the loop for the connection, for some work and its seconds.
        cut_off: ends the connection at once.

    Returns:
        The connection's TLS state.
    """
    tls = transport.get_extra_info("ssl_object")
    assert isinstance(tls, SlicedTls)
    tls.bind(transport, new_share, cut_off)
    return tls


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of one listener, all PEM.

    Attributes:
        cert: the server's certificate, followed by intermediate certificates.
        key: its private key, not encrypted.
        client_ca: the authorities of client certificates; ``None``: clients need no certificate.
        client_crl: revocation lists of these authorities; ``None``: nothing is revoked.
    """

    cert: str
    key: str
    client_ca: str | None = None
    client_crl: str | None = None


@dataclass(frozen=True, slots=True)
class Certificate:
    """Facts about a certificate, for people.

    Attributes:
        names: its host names; without any, its subject.
        ends: the end of its validity.
    """

    names: tuple[str, ...]
    ends: datetime


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a listener's TLS context.

    Raises:
        InvalidArgument: a file cannot be read or is invalid, or certificate and key do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslobject_class = SlicedTls
    for what, path in (
        ("certificate", files.cert),
        ("key", files.key),
        ("file of client authorities", files.client_ca),
        ("revocation list", files.client_crl),
    ):
        if path is not None:
            _check_readable(what, path)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except _Encrypted:
        raise InvalidArgument(
            f"the key {files.key} is encrypted, and no password can be typed for it; "
            "decrypt it with 'openssl pkey'"
        ) from None
    except ssl.SSLError as error:
        raise InvalidArgument(_fault(files, error)) from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except ssl.SSLError:
            raise InvalidArgument(
                f"the file of client authorities {files.client_ca} has no certificate in PEM form"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    if files.client_crl is not None:
        read_revoked(files.client_crl)  # otherwise OpenSSL might use it as another authority
        try:
            context.load_verify_locations(files.client_crl)
        except ssl.SSLError as error:
            raise InvalidArgument(
                f"OpenSSL cannot read the revocation list {files.client_crl}: {error.reason}"
            ) from None
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


class _Encrypted(Exception):
    """Error: the key is encrypted, and needs a password."""


def _no_password() -> str:
    raise _Encrypted


def _check_readable(what: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InvalidArgument(f"the {what} {path} cannot be read: {error.strerror}") from None


def _fault(files: TlsFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key {files.key} does not belong to the certificate {files.cert}"
    alone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        alone.load_verify_locations(files.cert)
    except ssl.SSLError:
        return f"{files.cert} has no certificate in PEM form"
    return f"{files.key} has no private key in PEM form that goes with {files.cert}"


def certificate_of(files: TlsFiles) -> Certificate:
    """Return the certificate that a client gets, determined by a handshake in memory.

    Raises:
        InvalidArgument: as `server_context`; or the certificate has expired or is not valid yet.
    """
    # Requirements for clients are not checked here.
    server = server_context(TlsFiles(files.cert, files.key))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust it regardless of its issuer
    client.load_verify_locations(files.cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(back, there, server_side=False),
        server.wrap_bio(there, back, server_side=True),
    )
    try:
        client_done = server_done = False
        while not (client_done and server_done):
            client_done, server_done = _shaken(ends[0]), _shaken(ends[1])
    except ssl.SSLCertVerificationError as error:
        raise InvalidArgument(f"the certificate {files.cert}: {error.verify_message}") from None
    # The types of getpeercert()'s result are too wide to be narrowed.
    shown: Any = ends[0].getpeercert()
    names = [value for _, value in shown.get("subjectAltName", ())]
    if not names:
        names = [value for part in shown["subject"] for _, value in part]
    return Certificate(
        tuple(names),
        datetime.fromtimestamp(ssl.cert_time_to_seconds(shown["notAfter"]), UTC),
    )


def _shaken(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
