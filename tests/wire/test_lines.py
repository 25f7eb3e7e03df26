"""dflockd's lines: cut anywhere, read as the protocol says, and one request kept at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.errors import InvalidArgument
from tenure.wire import lines
from tenure.wire.lines import (
    AUTH_BYTES,
    LINE_BYTES,
    BadReply,
    RawRequest,
    Reply,
    ReplyReader,
    RequestReader,
    acquire_terms,
    enqueue_terms,
    fence_of,
    grant,
    is_key,
    make_token,
    read_reply,
    renew_terms,
    wait_terms,
)

TOKEN = "00054fe3a1b2c3d4" + "0123456789abcdef"
LONGEST = b"k" * LINE_BYTES
TOO_LONG = b"k" * (LINE_BYTES + 1)


def read(stream: bytes, cuts: list[int] | None = None) -> tuple[list[RawRequest], RequestReader]:
    """The requests of a stream that arrives in pieces, and the reader after it."""
    reader = RequestReader()
    ends = [*sorted({min(cut, len(stream)) for cut in cuts or []}), len(stream)]
    found: list[RawRequest] = []
    begin = 0
    for end in ends:
        found += reader.feed(stream[begin:end])
        begin = end
    return found, reader


# Requests


@pytest.mark.parametrize(
    ("stream", "requests"),
    [
        (b"l\njob\n10\n", [("l", "job", "10")]),
        (b"l\r\njob\r\n10 33\r\n", [("l", "job", "10 33")]),
        (b"l\r\r\njob\n\r\n", [("l", "job", "")]),
        (b"e\njob\n\n", [("e", "job", "")]),
        (b"\n\n\n", [("", "", "")]),
        (b"r\na\nt\nr\nb\nu\n", [("r", "a", "t"), ("r", "b", "u")]),
        (b"l\n\xc3\xa9\n1\n", [("l", "é", "1")]),
        (b"l\n\xff\n1\nping\n_\n_\n", [("l", "\udcff", "1"), ("ping", "_", "_")]),
        (b"l\n" + LONGEST + b"\n1\n", [("l", "k" * LINE_BYTES, "1")]),
        (b"l\n" + LONGEST[:-1] + b"\r\n1\n", [("l", "k" * (LINE_BYTES - 1), "1")]),
        (b"l\nkey\n", []),
        (b"", []),
    ],
)
def test_three_lines_are_a_request(stream: bytes, requests: list[RawRequest]) -> None:
    for cuts in [], list(range(len(stream))):
        found, reader = read(stream, cuts)
        assert found == requests
        assert not reader.failed


@pytest.mark.parametrize(
    "line", [TOO_LONG + b"\n", LONGEST + b"\r\n", b"x" * 100_000 + b"\n"], ids=["1", "cr", "much"]
)
@pytest.mark.parametrize("before", [b"", b"l\n", b"l\nkey\n", b"auth\n", b"AUTH\n_\n"])
def test_behind_a_line_that_is_too_long_nothing_is_read(before: bytes, line: bytes) -> None:
    stream = b"ping\n_\n_\n" + before + line
    for cuts in [], [*range(40), len(stream) - 1]:
        found, reader = read(stream, cuts)
        assert found == [("ping", "_", "_")]
        assert reader.failed
        assert reader.feed(b"ping\n_\n_\n") == []
        assert reader.feed(b"x" * 1000) == []
        assert reader.kept == 0


def test_a_line_that_is_too_long_is_answered_when_it_ends_and_not_kept() -> None:
    reader = RequestReader()
    for _ in range(10):
        assert reader.feed(b"x" * LINE_BYTES) == []
        assert not reader.failed
        assert reader.kept <= LINE_BYTES
    reader.feed(b"\n")
    assert reader.failed


def test_a_token_may_be_longer_than_other_lines() -> None:
    found, _ = read(b"auth\r\n_\n" + b"t" * AUTH_BYTES + b"\n")
    assert found == [("auth", "_", "t" * AUTH_BYTES)]
    assert read(b"auth\n_\n" + b"t" * (AUTH_BYTES + 1) + b"\n")[1].failed


def test_lines_that_are_whole_are_counted() -> None:
    reader = RequestReader()
    counts = []
    for piece in b"l", b"\n", b"key", b"\n1", b"0\n":
        reader.feed(piece)
        counts.append(reader.lines)
    assert counts == [0, 1, 1, 2, 0]


@pytest.mark.parametrize(
    ("piece", "request_"),
    [
        (b"l\njob\n10\n", ("l", "job", "10")),
        (b"l\n\xc3\xa9\n\n", ("l", "é", "")),
        (b"l\r\njob\n10\n", None),
        (b"l\n\xff\n10\n", ("l", "\udcff", "10")),
        (b"l\njob\n", None),
        (b"l\njob\n10", None),
        (b"l\njob\n10\nr", None),
        (b"l\njob\n10\nping\n_\n_\n", None),
        (b"l\n" + LONGEST + b"\n10\n", None),
        (b"", None),
    ],
)
def test_a_request_that_is_a_piece_of_its_own_needs_no_feeding(
    piece: bytes, request_: RawRequest | None
) -> None:
    reader = RequestReader()
    assert reader.alone(piece) == request_
    assert (reader.kept, reader.lines) == (0, 0)


@pytest.mark.parametrize("before", [b"l", b"l\n", b"l\nkey\n1", TOO_LONG, TOO_LONG + b"\n"])
def test_nothing_is_a_request_of_its_own_behind_a_part_of_one(before: bytes) -> None:
    reader = RequestReader()
    reader.feed(before)
    assert reader.alone(b"ping\n_\n_\n") is None


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=40)
cuts = st.lists(st.integers(0, 2000), max_size=12)


@given(st.lists(st.tuples(texts, texts, texts), max_size=8), st.sampled_from(["\n", "\r\n"]), cuts)
def test_whatever_the_pieces_the_requests_are_those_that_were_sent(
    sent: list[RawRequest], end: str, where: list[int]
) -> None:
    stream = "".join(line + end for request in sent for line in request).encode()
    found, reader = read(stream, where)
    assert found == sent
    assert reader.kept == 0


@given(st.binary(max_size=3000), cuts)
def test_random_bytes_are_read_alike_in_any_pieces(stream: bytes, where: list[int]) -> None:
    whole, reader = read(stream)
    pieces, same = read(stream, where)
    if whole and (one := RequestReader().alone(stream)) is not None:
        assert whole == [one]
    assert (whole, reader.failed, reader.kept) == (pieces, same.failed, same.kept)
    assert reader.kept <= 2 * LINE_BYTES + AUTH_BYTES
    assert all(len(request) == 3 for request in whole)


@pytest.mark.parametrize(
    ("key", "fits"),
    [("job", True), ("a/b:c", True), ("é", True), ("\u00a0", True), ("\x0b", True), ("", False)]
    + [(f"a{space}b", False) for space in " \t\r\n"],
)
def test_a_key_is_not_empty_and_has_no_white_space(key: str, fits: bool) -> None:
    assert is_key(key) is fits


# Arguments


@pytest.mark.parametrize(
    ("argument", "lock", "semaphore"),
    [
        ("10", (10, 1, None), None),
        ("0", (0, 1, None), None),
        ("+5", (5, 1, None), None),
        (" 10\t33 ", (10, 1, 33), (10, 33, None)),
        ("007 08", (7, 1, 8), (7, 8, None)),
        ("0 1", (0, 1, 1), (0, 1, None)),
        ("0 0", None, None),
        ("0 -1", None, None),
        ("10 3 60", None, (10, 3, 60)),
        ("10 3 0", None, None),
        ("10 0 3", None, None),
        ("1 2 3 4", None, None),
        ("-1", None, None),
        ("-0", (0, 1, None), None),
        ("", None, None),
        (" ", None, None),
        ("1.5", None, None),
        ("1_0", None, None),
        ("\u0661", None, None),
        ("1\x1c2", None, None),
        ("0x1", None, None),
        ("+", None, None),
        ("9223372036", (9223372036, 1, None), None),
        ("9223372037", None, None),
        ("1 9223372037", None, (1, 9223372037, None)),
        ("1 9223372036854775807", None, (1, 2**63 - 1, None)),
        ("1 9223372036854775808", None, None),
    ],
)
def test_what_an_acquire_says(
    argument: str,
    lock: tuple[int, int, int | None] | None,
    semaphore: tuple[int, int, int | None] | None,
) -> None:
    assert acquire_terms(argument, counted=False) == lock
    assert acquire_terms(argument, counted=True) == semaphore


@pytest.mark.parametrize(
    ("argument", "lock", "semaphore"),
    [
        ("", (1, None), None),
        ("33", (1, 33), (33, None)),
        ("3 60", None, (3, 60)),
        ("3 0", None, None),
        ("0", None, None),
        ("-3", None, None),
        ("x", None, None),
        ("1 2 3", None, None),
    ],
)
def test_what_an_enqueue_says(
    argument: str, lock: tuple[int, int | None] | None, semaphore: tuple[int, int | None] | None
) -> None:
    assert enqueue_terms(argument, counted=False) == lock
    assert enqueue_terms(argument, counted=True) == semaphore


@pytest.mark.parametrize(
    ("argument", "timeout"),
    [("10", 10), ("0", 0), (" +3 ", 3), ("-1", None), ("", None), ("1 2", None), ("x", None)],
)
def test_what_a_wait_says(argument: str, timeout: int | None) -> None:
    assert wait_terms(argument) == timeout


@pytest.mark.parametrize(
    ("argument", "terms"),
    [
        (TOKEN, (TOKEN, None)),
        (f" {TOKEN}  60 ", (TOKEN, 60)),
        (f"{TOKEN} 0", None),
        (f"{TOKEN} x", None),
        (f"{TOKEN} 1 2", None),
        ("", None),
        (" ", None),
    ],
)
def test_what_a_renewal_says(argument: str, terms: tuple[str, int | None] | None) -> None:
    assert renew_terms(argument) == terms


@given(st.text(max_size=60))
def test_no_argument_is_more_than_wrong(argument: str) -> None:
    for counted in False, True:
        acquired = acquire_terms(argument, counted=counted)
        assert acquired is None or (acquired[0] >= 0 and acquired[1] >= 1)
        enqueued = enqueue_terms(argument, counted=counted)
        assert enqueued is None or enqueued[0] >= 1
    assert (wait_terms(argument) or 0) >= 0
    renewed = renew_terms(argument)
    assert renewed is None or renewed[0]


# What a client asks


@pytest.mark.parametrize(
    ("request_", "stream"),
    [
        (lines.acquire("job", 10), b"l\njob\n10\n"),
        (lines.acquire("job", 0, 33), b"l\njob\n0 33\n"),
        (lines.acquire("job", 10, limit=3), b"sl\njob\n10 3\n"),
        (lines.acquire("job", 10, 33, limit=3), b"sl\njob\n10 3 33\n"),
        (lines.enqueue("job"), b"e\njob\n\n"),
        (lines.enqueue("job", 33), b"e\njob\n33\n"),
        (lines.enqueue("job", 33, limit=3), b"se\njob\n3 33\n"),
        (lines.wait("job", 10), b"w\njob\n10\n"),
        (lines.wait("job", 10, counted=True), b"sw\njob\n10\n"),
        (lines.renew("é", TOKEN), b"n\n\xc3\xa9\n" + TOKEN.encode() + b"\n"),
        (lines.renew("job", TOKEN, 60, counted=True), f"sn\njob\n{TOKEN} 60\n".encode()),
        (lines.release("job", TOKEN), f"r\njob\n{TOKEN}\n".encode()),
        (lines.release("job", TOKEN, counted=True), f"sr\njob\n{TOKEN}\n".encode()),
        (lines.auth("secret word"), b"auth\n_\nsecret word\n"),
        (lines.PING, b"ping\n_\n_\n"),
        (lines.STATS, b"stats\n_\n_\n"),
    ],
)
def test_what_a_client_asks(request_: bytes, stream: bytes) -> None:
    assert request_ == stream
    assert len(read(request_)[0]) == 1


@pytest.mark.parametrize("key", ["", "a b", "a\nb", "k" * 257, "é" * 129, "\ud800"], ids=ascii)
def test_no_key_is_sent_that_a_server_refuses(key: str) -> None:
    with pytest.raises(InvalidArgument):
        lines.acquire(key, 1)
    assert read(lines.acquire("é" * 128, 1))[0] == [("l", "é" * 128, "1")]


def test_no_number_is_sent_that_a_server_refuses() -> None:
    for timeout, lease, limit in [
        (-1, 1, 1),
        (9223372037, 1, 1),
        (1, 0, 1),
        (1, 9223372037, 1),
        (1, 1, 0),
        (1, 1, 2**63),
    ]:
        with pytest.raises(InvalidArgument):
            lines.acquire("job", timeout, lease, limit=limit)
    for token in "", "a b", "a\n", "é", "x" * 200:
        with pytest.raises(InvalidArgument):
            lines.release("job", token)
    for token in "a\nb", "a\r", "t" * (AUTH_BYTES + 1):
        with pytest.raises(InvalidArgument):
            lines.auth(token)


@given(
    st.text(st.characters(codec="utf-8", exclude_characters=" \t\r\n"), min_size=1, max_size=60),
    st.integers(0, 9223372036),
    st.none() | st.integers(1, 9223372036),
    st.none() | st.integers(1, 2**63 - 1),
)
def test_a_server_reads_what_a_client_asked(
    key: str, timeout: int, lease: int | None, limit: int | None
) -> None:
    [(command, name, argument)], _ = read(lines.acquire(key, timeout, lease, limit=limit))
    counted = command == "sl"
    assert name == key
    assert acquire_terms(argument, counted=counted) == (timeout, limit or 1, lease)
    assert counted is (limit is not None)
    [(command, _, argument)], _ = read(lines.enqueue(key, lease, limit=limit))
    assert enqueue_terms(argument, counted=command == "se") == (limit or 1, lease)


# Replies


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("ok", Reply("ok")),
        (f"ok {TOKEN} 33", Reply("ok", TOKEN, 33)),
        (f"acquired {TOKEN} 1", Reply("acquired", TOKEN, 1)),
        ("ok 33", Reply("ok", lease=33)),
        ("ok 0", Reply("ok", lease=0)),
        ('ok {"connections": 1}', Reply("ok", body='{"connections": 1}')),
        ("queued", Reply("queued")),
        ("timeout", Reply("timeout")),
        ("error_limit_mismatch", Reply("error_limit_mismatch")),
    ],
)
def test_what_a_server_replies(line: str, reply: Reply) -> None:
    assert read_reply(line) == reply


@pytest.mark.parametrize(
    "line",
    [
        "",
        " ",
        "HTTP/1.1 400 Bad Request",
        "ok a b c",
        f"ok {TOKEN} 0",
        f"ok {TOKEN} x",
        "acquired 3",
        "ok ٣",
        "ok 9223372037",
        "queued 3",
        "-ERR",
        f"ok {TOKEN} -3",
        "220 mail ready",
    ],
)
def test_what_is_no_reply(line: str) -> None:
    with pytest.raises(BadReply):
        read_reply(line)


@given(st.text(max_size=60))
def test_no_line_is_more_than_a_bad_reply(line: str) -> None:
    try:
        reply = read_reply(line)
    except BadReply:
        return
    assert reply.status


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 9223372036))
def test_a_client_reads_what_a_server_granted(fence: int, salt: int, lease: int) -> None:
    token = make_token(fence, f"{salt:016x}")
    for word in "ok", "acquired":
        [line] = ReplyReader().feed(grant(word, token, lease))
        assert read_reply(line) == Reply(word, token, lease)
    assert fence_of(token) == fence


def test_what_is_no_token_has_no_fencing_token() -> None:
    for token in "", "x" * 32, TOKEN + "0", TOKEN[1:], TOKEN.upper():
        assert fence_of(token) is None


@given(st.lists(texts, max_size=8), cuts)
def test_whatever_the_pieces_the_replies_are_those_that_were_sent(
    sent: list[str], where: list[int]
) -> None:
    stream = "".join(line + "\n" for line in sent).encode()
    reader = ReplyReader()
    ends = [*sorted({min(cut, len(stream)) for cut in where}), len(stream)]
    found: list[str] = []
    begin = 0
    for end in ends:
        found += reader.feed(stream[begin:end])
        begin = end
    assert found == sent
    assert reader.kept == 0


def test_no_more_of_a_reply_is_kept_than_it_may_have() -> None:
    for stream in b"x" * 101, b"x" * 101 + b"\n", b"ok\n" + b"x" * 101:
        with pytest.raises(BadReply):
            ReplyReader(100).feed(stream)
    reader = ReplyReader(100)
    reader.feed(b"x" * 60)
    with pytest.raises(BadReply):
        reader.feed(b"x" * 41)
    with pytest.raises(BadReply):
        ReplyReader().feed(b"\xff\n")
