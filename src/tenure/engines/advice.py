"""Advice for a failed connection: the end of the message, for people."""

from __future__ import annotations

import socket
import ssl

_ANOTHER_NAME = frozenset({62, 64})
"""OpenSSL's codes for a valid certificate of another host name, or address."""


def on_connecting(error: BaseException | None, plain: str) -> str:
    """Return the advice after a semicolon, or an empty text.

    Args:
        error: the system's error.
        plain: the scheme without TLS, such as ``tenure``.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _ANOTHER_NAME:
            return "; use a name that is in it, or give that name: ?tls_server_name=NAME"
        return "; name the authority that has signed it: ?tls_ca=FILE"
    if isinstance(error, ssl.SSLError):
        return f"; if it does not use TLS, write {plain}://"
    if isinstance(error, socket.gaierror):
        return "; check the name of the host"
    if isinstance(error, PermissionError):
        return "; let this user use the socket (the server's ?mode=0660 lets its group)"
    return ""
