"""YDB's coordination API through the server, beside the bare rates of two gRPC libraries.

Servers run in processes of their own: this module, run with ``python -m benchmarks.ydb_surface
KIND``. All of them, and the client, run on uvloop. The client is grpclib's, and the same for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import h2.config
import h2.connection
import uvloop
from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from grpclib.exceptions import StreamTerminatedError
from grpclib.server import Server

from benchmarks.measure import Measured
from benchmarks.servers import CLIENT, SERVER, on_core
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.limits import Limits
from tenure.server.ydb import YdbListener
from tenure.server.ydb.messages import Request, Response
from tests.server.certificates import Authority

METHOD = "/Ydb.Coordination.V1.CoordinationService/Session"
STREAMS, WINDOW = 8, 8
SECONDS, ROUNDS = 2.0, 5
IDLE_SESSIONS, IDLE_CONNECTIONS, IDLE_SECONDS = 2_000, 10, 10.0
FOREVER = 2**64 - 1
_runs = itertools.count()


# Servers


def _pong(request: Any) -> Any:
    return Response(pong=Response.PingPong(opaque=request.ping.opaque))


class Echo:
    """grpclib's server, as it is."""

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handler of the one method."""
        return {METHOD: Handler(self.echo, Cardinality.STREAM_STREAM, Request, Response)}

    @staticmethod
    async def echo(stream: Any) -> None:
        """Answer each message."""
        async for request in stream:
            await stream.send_message(_pong(request))


async def _serve(kind: str) -> None:
    port = 0
    if kind == "grpclib":
        server = Server([Echo()])
        await server.start("127.0.0.1", 0)
        bound: Any = server._server
        port = bound.sockets[0].getsockname()[1]
    elif kind == "grpcio":

        async def echo(requests: Any, _context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                yield _pong(request)

        method = grpc.stream_stream_rpc_method_handler(
            echo,
            request_deserializer=Request.FromString,
            response_serializer=Response.SerializeToString,
        )
        _, service, name = METHOD.split("/")
        stock = grpc.aio.server()
        stock.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: method}),)
        )
        port = stock.add_insecure_port("127.0.0.1:0")
        await stock.start()
    else:
        _, store, *files = kind.split(" ")
        engine = connect_engine(store, SystemClock())
        await engine.open()
        tls = None
        if files:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*files)
        limits = Limits(sessions_per_connection=IDLE_SESSIONS)
        context = Context(engine, limits, Authenticator(None), logging.getLogger("tenure.server"))
        scheme = "ydbs" if tls else "ydb"
        listener = YdbListener(context, f"{scheme}://127.0.0.1:0", tls=tls)
        await listener.open()
        port = int(listener.address.rpartition(":")[2].partition("/")[0])
    print(port, flush=True)
    await asyncio.Event().wait()


@dataclass
class Process:
    """A server's process, seen from outside."""

    pid: int
    port: int

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Bytes in memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def server(kind: str) -> Iterator[Process]:
    """Run a server of this kind in a process of its own."""
    with on_core(SERVER):
        started = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ydb_surface", kind],
            stdout=subprocess.PIPE,
            text=True,
        )
    with started as process:
        try:
            assert process.stdout is not None
            yield Process(process.pid, int(process.stdout.readline()))
        finally:
            process.kill()


# The client


@contextlib.asynccontextmanager
async def _stream(channel: Channel) -> AsyncIterator[Any]:
    call = channel.request(METHOD, Cardinality.STREAM_STREAM, Request, Response)
    with contextlib.suppress(StreamTerminatedError):  # it is cut off in the end
        async with call:
            await call.send_request()
            yield call
            await call.cancel()


def _ping(_slot: int, turn: int) -> Any:
    return Request(ping=Request.PingPong(opaque=turn))


def acquire_or_release(slot: int, turn: int) -> Any:
    """Return the message of a turn: an acquire, then a release."""
    if turn % 2:
        ask = Request.ReleaseSemaphore(req_id=slot, name=f"mutex-{slot}")
        return Request(release_semaphore=ask)
    return Request(
        acquire_semaphore=Request.AcquireSemaphore(
            req_id=slot,
            name=f"mutex-{slot}",
            timeout_millis=FOREVER,
            count=FOREVER,
            ephemeral=True,
        )
    )


async def _busy(channel: Channel, first: int, until: float, ask: Callable[[int, int], Any]) -> int:
    """Keep so many questions under way on one stream; returns how many were answered."""
    session = ask is not _ping
    turns = [0] * WINDOW
    answered = 0
    async with _stream(channel) as call:
        if session:
            start = Request.SessionStart(path="/local/default", timeout_millis=30_000)
            await call.send_message(Request(session_start=start))
        for slot in range(WINDOW):
            await call.send_message(ask(first + slot, 0))
        while time.perf_counter() < until:
            said = await call.recv_message()
            kind = said.WhichOneof("response")
            if kind == "pong":
                slot = answered % WINDOW
            elif kind == "acquire_semaphore_result":
                assert said.acquire_semaphore_result.acquired
                slot = said.acquire_semaphore_result.req_id - first
            elif kind == "release_semaphore_result":
                assert said.release_semaphore_result.released
                slot = said.release_semaphore_result.req_id - first
            elif kind == "ping":
                pong = Request.PingPong(opaque=said.ping.opaque)
                await call.send_message(Request(pong=pong))
                continue
            else:
                assert kind == "session_started", said
                continue
            answered += 1
            turns[slot] += 1
            await call.send_message(ask(first + slot, turns[slot]))
    return answered


async def _rate(server: Process, ask: Callable[[int, int], Any], tls: Any) -> tuple[float, float]:
    """Questions answered a second, and microseconds of the server's processor for each."""
    channel = Channel("127.0.0.1", server.port, ssl=tls)
    first = next(_runs) * STREAMS * WINDOW  # what a former run held is held for its window yet
    begun, cpu = time.perf_counter(), server.cpu()
    try:
        answered = sum(
            await asyncio.gather(
                *(_busy(channel, first + i * WINDOW, begun + SECONDS, ask) for i in range(STREAMS))
            )
        )
        took = time.perf_counter() - begun
        return answered / took, (server.cpu() - cpu) / answered * 1e6
    finally:
        channel.close()


def _measured_rate(server: Process, ask: Any, tls: Any = None) -> tuple[float, float]:
    with on_core(CLIENT):
        return uvloop.run(_rate(server, ask, tls))


async def _pings_until_goaway(server: Process) -> int | None:
    """How many HTTP/2 pings without data are answered, of 50; ``None`` if all are."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = h2.connection.H2Connection(
        h2.config.H2Configuration(client_side=True, header_encoding="ascii")
    )
    client.initiate_connection()
    answered = 0
    try:
        for number in range(50):
            client.ping(number.to_bytes(8, "big"))
            writer.write(client.data_to_send())
            acknowledged = False
            while not acknowledged:
                data = await reader.read(65536)
                names = [type(event).__name__ for event in client.receive_data(data)]
                if not data or "ConnectionTerminated" in names:
                    return answered
                acknowledged = "PingAckReceived" in names
                writer.write(client.data_to_send())
            answered += 1
    finally:
        writer.close()
    return None


async def _idle(server: Process) -> tuple[float, float]:
    """Bytes for each idle session, and the share of a core that all of them take."""
    channels = [Channel("127.0.0.1", server.port) for _ in range(IDLE_CONNECTIONS)]
    before = server.memory()
    ready = asyncio.Semaphore(0)

    async def sit(channel: Channel) -> None:
        async with _stream(channel) as call:
            start = Request.SessionStart(path="/local/default", timeout_millis=30_000)
            await call.send_message(Request(session_start=start))
            while (said := await call.recv_message()) is not None:
                if said.HasField("session_started"):
                    ready.release()
                elif said.HasField("ping"):
                    pong = Request.PingPong(opaque=said.ping.opaque)
                    await call.send_message(Request(pong=pong))

    tasks = [
        asyncio.ensure_future(sit(channels[i % IDLE_CONNECTIONS])) for i in range(IDLE_SESSIONS)
    ]
    try:
        for _ in tasks:
            await ready.acquire()
        await asyncio.sleep(2)
        cpu, begun = server.cpu(), time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        share = (server.cpu() - cpu) / (time.perf_counter() - begun)
        assert not any(task.done() for task in tasks), "a session was lost"
        return (server.memory() - before) / IDLE_SESSIONS, share
    finally:
        for channel in channels:
            channel.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# The figures


def measure() -> list[Measured]:
    """Measure the rates of the servers, side by side."""
    with (
        tempfile.TemporaryDirectory() as folder,
        server("grpclib") as bare,
        server("grpcio") as stock,
        server("tenure memory://") as tenure,
    ):
        authority = Authority(Path(folder))
        pair = authority.signs("localhost")
        trust = ssl.create_default_context(cafile=authority.cert)
        with server(f"tenure memory:// {pair.cert} {pair.key}") as secure:
            trials: dict[str, Callable[[], tuple[float, float]]] = {
                "tenure": lambda: _measured_rate(tenure, acquire_or_release),
                "grpclib": lambda: _measured_rate(bare, _ping),
                "grpcio": lambda: _measured_rate(stock, _ping),
                "tenure, TLS": lambda: _measured_rate(secure, acquire_or_release, trust),
            }
            rounds = [{name: trial() for name, trial in trials.items()} for _ in range(ROUNDS)]
        pings = {
            name: uvloop.run(_pings_until_goaway(server))
            for name, server in (("tenure", tenure), ("grpclib", bare), ("grpcio", stock))
        }
    with on_core(CLIENT), server("tenure memory://") as process:
        bytes_each, share = uvloop.run(_idle(process))

    def median(name: str, which: int = 0) -> float:
        return statistics.median(each[name][which] for each in rounds)

    ratio = statistics.median(each["tenure"][0] / each["grpclib"][0] for each in rounds)
    notes: dict[str, object] = {f"{name}, per second": median(name) for name in trials}
    notes |= {f"{name}, server's us each": median(name, 1) for name in trials}
    notes |= {f"{name}, idle pings before GOAWAY": told for name, told in pings.items()}
    rate = "answers/s"
    return [
        Measured(
            "YDB surface, 8 streams x 8 in flight",
            *(median("tenure"), rate, "bare grpclib echo", median("grpclib"), ratio),
            at_least=0.6,
            notes=notes,
        ),
        Measured(
            "the same, grpcio's bare echo beside",
            *(median("tenure"), rate, "bare grpc.aio echo", median("grpcio")),
            statistics.median(each["tenure"][0] / each["grpcio"][0] for each in rounds),
        ),
        Measured(
            "the same inside TLS",
            *(median("tenure, TLS"), rate, "without TLS", median("tenure")),
            statistics.median(each["tenure, TLS"][0] / each["tenure"][0] for each in rounds),
        ),
        Measured(
            f"{IDLE_SESSIONS:,} idle gRPC sessions: memory each",
            *(bytes_each / 1024, "KiB", "", 0, bytes_each / 1024),
        ),
        Measured(
            f"{IDLE_SESSIONS:,} idle gRPC sessions: processor",
            *(share, "of a core", "", 0, share),
        ),
    ]


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
