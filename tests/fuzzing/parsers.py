"""Readers of protocols, of URLs, and of what programs write into a store."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from msgspec import DecodeError

from tenure import identity
from tenure._client.session_handle import ResumeToken
from tenure.engines import split_client_parameters
from tenure.engines.dflockd import url as dflockd_url
from tenure.engines.etcd import answers
from tenure.engines.etcd import url as etcd_url
from tenure.engines.etcd.grpc import StreamCall
from tenure.engines.etcd.http2 import Http2Connection, head
from tenure.engines.etcd.wire import WATCH
from tenure.engines.native import url as native_url
from tenure.engines.postgresql import url as postgresql_url
from tenure.engines.redis import url as redis_url
from tenure.engines.sqlite import url as sqlite_url
from tenure.engines.ydb import url as ydb_url
from tenure.errors import EngineError, InvalidArgument, TenureError
from tenure.server import addresses
from tenure.server.dflockd.claims import ClaimRecord
from tenure.wire.frames import FrameReader
from tenure.wire.lines import (
    LINE_BYTES,
    BadReply,
    ReplyReader,
    RequestReader,
    acquire_terms,
    enqueue_terms,
    read_reply,
    renew_terms,
    wait_terms,
)
from tenure.wire.messages import client_message, server_message
from tests.fuzzing.checks import Run, Target
from tests.fuzzing.mutations import pieces
from tests.fuzzing.samples import CLIENT_MESSAGES, ETCD_ANSWERS, HTTP2_ANSWERS, SERVER_MESSAGES

# The native protocol


def _native(decode: Callable[[memoryview], Any]) -> Run:
    def run(data: bytes, chance: random.Random) -> None:
        whole = _outcome(lambda: [decode(frame) for frame in FrameReader(1 << 20).feed(data)])
        reader = FrameReader(1 << 20)
        cut = _outcome(
            lambda: [
                decode(frame) for piece in pieces(chance, data) for frame in reader.feed(piece)
            ]
        )
        assert cut == whole, "how the network cuts the bytes changes what is read"
        assert reader.kept <= len(data)
        if isinstance(whole, Exception):
            raise whole

    return run


def _outcome(read: Callable[[], Any]) -> Any:
    try:
        return repr(read())  # not every number equals itself
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _Same(error)


class _Same(Exception):
    """An error that equals another of the same kind."""

    def __init__(self, error: Exception) -> None:
        self.kind = type(error)
        super().__init__(str(error))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.kind is self.kind

    def __hash__(self) -> int:
        return hash(self.kind)


# dflockd's lines


def _requests(data: bytes, chance: random.Random) -> None:
    reader = RequestReader()
    found = [each for piece in pieces(chance, data) for each in reader.feed(piece)]
    whole = RequestReader()
    assert whole.feed(data) == found or reader.failed
    assert reader.kept < 64 * 1024, "a request that is not whole is bounded"
    for _, _, argument in found:
        if (
            len(argument.encode(errors="surrogateescape")) > LINE_BYTES
        ):  # of `auth`, which is no number
            continue
        for counted in (False, True):
            acquire_terms(argument, counted=counted)
            enqueue_terms(argument, counted=counted)
        wait_terms(argument)
        renew_terms(argument)


def _replies(data: bytes, chance: random.Random) -> None:
    reader = ReplyReader(64 * 1024)
    for piece in pieces(chance, data):
        for line in reader.feed(piece):
            read_reply(line)


# etcd


def _http2(data: bytes, chance: random.Random) -> None:
    connection = Http2Connection(lambda: None)
    for _ in range(3):
        call = StreamCall(head(WATCH, "localhost", secure=False, more=()))
        connection.begin(call)
        call.write(b"x")
    sent = len(connection.take())
    for piece in pieces(chance, data):
        connection.receive(piece)
        connection.pong()
        sent += len(connection.take())
    assert sent < 4096 + 8 * len(data), "it answers with more than it was sent"


def _answers(data: bytes, _: random.Random) -> None:
    for read in (answers.read_answer, answers.read_range, answers.read_lease, answers.read_watch):
        try:
            read(data)
        except EngineError:
            continue


_UNREADABLE = (DecodeError, RecursionError, UnicodeDecodeError, _Same)
"""What a connection is ended for."""


# Texts


def _text(read: Callable[[str], object]) -> Run:
    return lambda data, _: _read(read, data)


def _read(read: Callable[[str], object], data: bytes) -> None:
    read(data.decode(errors="surrogateescape"))


def _url(text: str) -> None:
    scheme = text.partition(":")[0].lower()
    for each in (text, text.partition("://")[2] and f"tenure://{text.partition('://')[2]}"):
        if each:
            split_client_parameters(each)
    parse = _ENGINES.get(scheme)
    if parse is not None:
        parse(text)


_ENGINES: dict[str, Callable[[str], object]] = {
    "sqlite": sqlite_url.parse,
    "redis": redis_url.parse,
    "rediss": redis_url.parse,
    "redis+cluster": redis_url.parse,
    "redis+sentinel": redis_url.parse,
    "redis+unix": redis_url.parse,
    "postgresql": postgresql_url.parse,
    "postgres": postgresql_url.parse,
    "etcd": etcd_url.parse,
    "etcds": etcd_url.parse,
    "tenure": native_url.parse,
    "tenures": native_url.parse,
    "tenure+unix": native_url.parse,
    "ydb": ydb_url.parse,
    "ydbs": ydb_url.parse,
    "dflockd": dflockd_url.parse,
    "dflockds": dflockd_url.parse,
}


def _stored(data: bytes, _: random.Random) -> None:
    """What programs write into a store, and others read."""
    ClaimRecord.of(data, "name")
    identity.part(data.decode(errors="replace"))
    identity.retold(data.decode(errors="replace"), "x\x1fy")


PARSERS = (
    Target("native-client", _native(client_message().decode), CLIENT_MESSAGES, _UNREADABLE),
    Target("native-server", _native(server_message().decode), SERVER_MESSAGES, _UNREADABLE),
    Target(
        "dflockd-requests",
        _requests,
        (
            *(b"l\nkey\n10\n", b"sl\nkey\n10 3 33\n", b"r\nkey\n0123456789abcdef\n"),
            *(b"e\nkey\n\n", b"w\nkey\n10\n", b"n\nkey\ntoken 33\n", b"stats\n_\n\n"),
            b"auth\n_\nsecret\r\nse\r\nkey\r\n3 33\r\n",
        ),
    ),
    Target(
        "dflockd-replies",
        _replies,
        (
            *(b"ok 0123456789abcdef0123456789abcdef 33\n", b"timeout\n", b"error_auth\n"),
            *(b"acquired 0123456789abcdef 33\nqueued\nok\nok 33\n", b'ok {"connections": 1}\r\n'),
        ),
        (BadReply,),
    ),
    Target("etcd-http2", _http2, HTTP2_ANSWERS),
    Target("etcd-answers", _answers, ETCD_ANSWERS),
    Target(
        "urls",
        _text(_url),
        tuple(
            each.encode()
            for each in (
                "sqlite:///jobs.db?mode=0660&durability=full&answer_timeout=5",
                "redis://user:secret@cache:6379,other/3?prefix=a&max_window=30&min_replicas=1",
                "redis+cluster://a,b:7001?ssl=true&tls_verify=ca",
                "redis+sentinel://a:26379,b/main?fresh=true&eviction=allow&busy_poll=100",
                "rediss://:secret@[::1]:6380/0?tls_verify=no",
                "postgresql://user:secret@a:5432,b/jobs?schema=x&durability=process&sslmode=prefer",
                "postgres://user@/jobs?host=/run/postgresql&tls_ca=/ca.pem&listen=a:5432",
                "etcd://user:pass@a:2379,b,[fe80::1]:2379?prefix=/x&timeout=5",
                "tenure://token@a:7070,b?busy-poll=200",
                "tenure+unix:///run/tenure/tenure.sock?busy-poll=0",
                "ydb://host:2136/local?fencing_tokens=false&connect_timeout=5",
                "dflockd://a:6388,b?lease=33&token-file=x",
            )
        ),
        (TenureError,),
        weight=300,
    ),
    Target(
        "listeners",
        _text(addresses.parse),
        (
            *(b"tenure://127.0.0.1:7070", b"tenures://:7070?tls-cert=a.pem&tls-key=b.key"),
            *(b"tenure+unix:///run/t.sock?mode=0660", b"ydb://[::]:2136?endpoint=a:1"),
            b"dflockd://0.0.0.0:6388?lease=33&sweep=1",
        ),
        (InvalidArgument,),
    ),
    Target(
        "resume-tokens",
        _text(ResumeToken.parse),
        (str(ResumeToken("/default", 7, 30.0, bytes(16))).encode(), b"tenure1_"),
        (InvalidArgument,),
    ),
    Target(
        "stored",
        _stored,
        (
            *(ClaimRecord("0" * 32, 33, 12345).to_bytes(), b"dflockd " + b"0" * 16 + b" 33 12345"),
            *(b"nightly [host=db-1 pid=42 program=x.py]", b"a text [host=]"),
        ),
    ),
)
