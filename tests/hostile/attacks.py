"""The table of attacks. Each runs in several threads of one process until its target is stopped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tenure.wire.frames import FrameWriter
from tenure.wire.messages import VERSION, Attach, Enqueue, Hello, Ping, Renew, Withdraw
from tests.hostile import connecting, http2, reads
from tests.hostile.strangers import KINDS, strangers
from tests.hostile.target import LISTENERS, Target

_ASYNCIO = ("--loop", "asyncio")  # without it, uvloop is used where it is installed


@dataclass(frozen=True)
class Attack:
    """One way to harm a server.

    Attributes:
        run: the attack; it returns when `Target.stopped` is set.
        threads: how many run at a time.
        tls: the server's listeners have TLS.
        tokens: the server requires a token, which the attack does not know.
        options: of the server.
        memory: MiB by which the server may grow.
        title: its name in the table, if not that of `run`.
    """

    run: Callable[[Target], None]
    threads: int = 16
    tls: bool = False
    tokens: bool = False
    options: tuple[str, ...] = ()
    memory: int = 128
    title: str = ""

    @property
    def name(self) -> str:
        """The name of the attack in the table."""
        if self.title:
            return self.title
        module = self.run.__module__.rpartition(".")[2]
        name = self.run.__name__ if module == "attacks" else f"{module}_{self.run.__name__}"
        name = name.replace("_", "-") + "-tls" * self.tls + "-tokens" * self.tokens
        return name + "-asyncio" * (self.options == _ASYNCIO)


def _native(*messages: object) -> bytes:
    writer = FrameWriter(1 << 20)
    for each in messages:
        writer.add(each)  # type: ignore[arg-type]  # any message
    return bytes(writer.take())


_HELLO = _native(Hello(VERSION, VERSION, [], "", b"attacker"))


_SESSION = _HELLO + _native(Attach(1, 1, "new", "/default", 10.0))


def native_pings(target: Target) -> None:
    """Send pings."""
    target.flood("tenure", _HELLO, _native(Ping()))


def native_renewals(target: Target) -> None:
    """Renew a session without end."""
    target.flood("tenure", _SESSION, _native(Renew(1, 1)))


def native_acquires(target: Target) -> None:
    """Acquire and release semaphores that nobody else has."""
    target.flood("tenure", _SESSION, _acquires)


def _acquires() -> Iterator[bytes]:
    name = f"semaphore-{threading.get_ident()}"
    for first in itertools.count(2, 200):
        yield b"".join(
            _native(Enqueue(rid, 1, rid, name, 1, b"", None, True), Withdraw(rid + 1, 1, rid))
            for rid in range(first, first + 200, 2)
        )


def native_first_bytes(target: Target) -> None:
    """Begin frames that never end, on one connection after the other."""
    target.flood("tenure", b"", lambda: [b"\x00\x00\x10\x00", b"\x00"])


def native_guesses(target: Target) -> None:
    """Guess tokens, on one connection after the other."""
    hello = _native(Hello(VERSION, VERSION, [], "a-token-that-is-not-valid", b"attacker"))
    target.flood("tenure", b"", lambda: [hello, hello])


def dflockd_guesses(target: Target) -> None:
    """Guess tokens, on one connection after the other."""
    guess = b"auth\n_\na-token-that-is-not-valid\n"
    target.flood("dflockd", b"", lambda: [guess, guess])


def http_requests(target: Target) -> None:
    """Send requests for everything, without waiting for the responses."""
    request = "GET {} HTTP/1.1\r\nhost: localhost\r\n\r\n"
    paths = "/metrics", "/healthz", "/readyz", "/", "/api/v1/semaphores?node=/default"
    target.flood("http", b"", "".join(map(request.format, paths)).encode())


def http_guesses(target: Target) -> None:
    """Guess tokens, on one connection after the other."""
    guess = b"GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer wrong\r\n\r\n"
    target.flood("http", b"", lambda: [guess, guess])


def http_headers(target: Target) -> None:
    """Begin requests with headers that never end, on one connection after the other."""
    target.flood("http", b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n")


def http_bodies(target: Target) -> None:
    """Send bodies in the smallest chunks."""
    head = b"POST /sign-in HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    target.flood("http", head, b"1\r\na\r\n")


def handshakes(target: Target) -> None:
    """Make one TLS handshake after the other."""
    target.flood("tenure", b"", list)


def tiny_records(target: Target) -> None:
    """Send each byte in a TLS record of its own."""
    target.flood("dflockd", b"", b"\n", piece=1)


def dflockd_pings(target: Target) -> None:
    """Send pings."""
    target.flood("dflockd", b"", b"ping\n_\n_\n")


def dflockd_short_lines(target: Target) -> None:
    """Send the shortest requests that there are."""
    target.flood("dflockd", b"", b"\n")


def dflockd_nonsense(target: Target) -> None:
    """Send commands that there are not."""
    target.flood("dflockd", b"", b"nonsense\nkey\n1\n")


ATTACKS: dict[str, Attack] = {
    each.name: each
    for each in (
        Attack(native_pings),
        Attack(native_pings, options=_ASYNCIO),
        Attack(native_renewals),
        Attack(native_acquires),
        Attack(native_first_bytes),
        Attack(native_guesses, tokens=True),
        Attack(handshakes, tls=True),
        Attack(tiny_records, tls=True),
        Attack(dflockd_guesses, tokens=True),
        Attack(dflockd_nonsense),
        Attack(dflockd_pings),
        Attack(dflockd_short_lines),
        Attack(http_requests),
        Attack(http_requests, options=_ASYNCIO),
        Attack(http_requests, tls=True),
        Attack(http_requests, tokens=True),
        Attack(http_guesses, tokens=True),
        Attack(http_headers),
        Attack(http_bodies),
        Attack(http2.settings),
        Attack(http2.settings, options=_ASYNCIO),
        Attack(http2.settings, tls=True),
        Attack(http2.settings_of_a_client),
        Attack(http2.settings_of_a_client, tls=True, memory=64),
        Attack(http2.pings),
        Attack(http2.priorities),
        Attack(http2.window_updates),
        Attack(http2.empty_data),
        Attack(http2.rapid_resets),
        Attack(http2.continuations),
        Attack(http2.header_lists),
        Attack(http2.calls),
        Attack(http2.calls, tokens=True),
        Attack(http2.small_messages),
        Attack(http2.session_pings),
        Attack(reads.lists, memory=256),
        Attack(reads.resumes),
        Attack(reads.statistics),
        Attack(reads.descriptions, memory=192),
        Attack(reads.short_descriptions, memory=192),
        Attack(reads.attaches, memory=320),  # 1,100 streams on each of 16 connections
        Attack(connecting.silent, memory=256),
        Attack(connecting.hurried, memory=256),
        Attack(connecting.client_hellos, tls=True, memory=256),
    )
}
for _listener, _count, _kind in itertools.product(LISTENERS, (300, 1500), KINDS):
    _title = f"strangers-{_listener}-{_count}{_kind}"
    _tls = _kind.startswith("-tls")
    ATTACKS[_title] = Attack(
        partial(strangers, listener=_listener, count=_count, kind=_kind),
        threads=1,
        tls=_tls,
        tokens=True,
        memory=512 if _tls and _count == 1500 else 256,  # uvloop has 256 KiB for each with TLS
        title=_title,
    )
