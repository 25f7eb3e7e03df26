"""Files that an administrator writes, and that a server reads at its start and at SIGHUP."""

from __future__ import annotations

import base64
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from tenure.errors import InvalidArgument
from tenure.server.auth.accounts import read_revoked
from tenure.server.auth.tokens import read_tokens
from tenure.server.sources import load
from tests.fuzzing.checks import Run, Target


def _file(read: Callable[[str], object]) -> Run:
    def run(data: bytes, _: random.Random) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            path.write_bytes(data)
            read(str(path))

    return run


_CONFIGURATION = b"""# the server
store = "sqlite:////var/lib/tenure/coord.db?durability=full"
listen = ["tenures://0.0.0.0:7070", "tenure+unix:///run/tenure.sock?mode=0660", "ydb://:2136"]
tls-cert = "server.pem"
tls-key = "server.key"
log-format = "json"
max-sessions = 20000
drain-time = 1.5
busy-poll = 200
"""

_TOKENS = b"""[tokens.reports]
hash = "sha256:%s"
expires = 2027-01-01T00:00:00Z
permissions = { "/billing" = "hold", "/" = "read" }
quotas = { sessions = 100, requests = 1000 }

[certificates."CN=worker"]
permissions = { "/jobs" = "administer" }

[uids.1000]
quotas = { nodes = 3 }
""" % (b"0" * 64)


def _item(tag: int, *content: bytes) -> bytes:
    body = b"".join(content)
    return bytes((tag, len(body))) + body


_ENTRY = _item(0x30, _item(0x02, b"\x07"), _item(0x17, b"261122000000Z"))
_LIST = _item(
    0x30,
    _item(
        0x30,
        _item(0x02, b"\x01"),
        _item(0x30, _item(0x06, b"\x2a\x03")),
        _item(0x30, _item(0x31, _item(0x30, _item(0x06, b"\x55\x04\x03"), _item(0x0C, b"ca")))),
        _item(0x17, b"261122000000Z"),
        _item(0x17, b"271122000000Z"),
        _item(0x30, _ENTRY, _ENTRY),
    ),
)


def _pem(der: bytes) -> bytes:
    return b"-----BEGIN X509 CRL-----\n%s-----END X509 CRL-----\n" % base64.encodebytes(der)


def _revoked(path: str) -> None:
    """Read the list as it stands, and as the content of a list that is well-formed PEM."""
    file = Path(path)
    data = file.read_bytes()
    if not data.startswith(b"-----"):
        file.write_bytes(_pem(data))
    read_revoked(path)


FILES = (
    Target(
        "configuration",
        _file(lambda path: load({}, {}, path)),
        (_CONFIGURATION, b"max-sessions = 1_000\nlisten = []\n[a.b]\nc = [[1, 2], {}]\n"),
        (InvalidArgument,),
    ),
    Target(
        "token-files",
        _file(read_tokens),
        (_TOKENS, b"# since November\n" + b"7d9f0c5b8e2a4f6d1c3b5a7e9f0d2c4b\n" * 2),
        (InvalidArgument,),
    ),
    Target("revocation-lists", _file(_revoked), (_LIST, _pem(_LIST)), (InvalidArgument,)),
)
