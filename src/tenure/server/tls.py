"""The server's TLS contexts, and the checks of their files.

The minimum is TLS 1.2. With a file of client authorities, a client needs a certificate that one of
them has signed, and that is not revoked. Certificates do not replace tokens.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tenure.errors import InvalidArgument
from tenure.server.auth.revocation import read_revoked
from tenure.server.tls_input import SlicedTls


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
