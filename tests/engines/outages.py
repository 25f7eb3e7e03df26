"""Networked stores behind a network that tests cut, stall and refuse.

Each is a real server of this host. `NETWORKED` names them for parametrized tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import urlsplit

from tests.engines.dflockd.servers import InThread
from tests.engines.etcd import servers as etcd
from tests.engines.postgresql import servers as postgresql
from tests.engines.redis import servers as redis
from tests.engines.ydb.behind import Server as YdbServer
from tests.server.network import Network
from tests.server.served import served


class Afar:
    """A store behind a network.

    Attributes:
        url: the store's URL, through the network.
        direct: the same without the network.
        network: the network, which is the test's to break.
    """

    def __init__(self, url: str, port: int) -> None:
        self.direct = url.format(port=port)
        self.network = Network(lambda: port)
        self.network.start()
        self.url = url.format(port=self.network.port)


@contextmanager
def _behind_a_network(url: str, port: int) -> Iterator[Afar]:
    afar = Afar(url, port)
    try:
        yield afar
    finally:
        afar.network.flow()
        afar.network.stop()


@contextmanager
def _redis() -> Iterator[Afar]:
    port = redis.free_port()
    url = "redis://127.0.0.1:{port}?fresh=true"
    with redis.a_server(port=port), _behind_a_network(url, port) as afar:
        yield afar


@contextmanager
def _postgresql() -> Iterator[Afar]:
    """The shared server, which has a Unix socket alone."""
    with postgresql.a_schema() as url:
        folder = postgresql.shared().folder
        through = url.replace(f"host={folder}", "host=127.0.0.1").replace(
            "@/", "@127.0.0.1:{port}/"
        )
        door = Network(lambda: f"{folder}/.s.PGSQL.5432")
        door.start()
        try:
            with _behind_a_network(through, door.port) as afar:
                yield afar
        finally:
            door.stop()


@contextmanager
def _etcd() -> Iterator[Afar]:
    with etcd.a_prefix() as url:
        parts = urlsplit(url)
        assert parts.port is not None
        through = f"etcd://127.0.0.1:{{port}}?{parts.query}"
        with _behind_a_network(through, parts.port) as afar:
            yield afar


@contextmanager
def _native() -> Iterator[Afar]:
    with served("memory://") as server:
        port = int(server.address.rpartition(":")[2])
        with _behind_a_network("tenure://127.0.0.1:{port}", port) as afar:
            yield afar


@contextmanager
def _ydb() -> Iterator[Afar]:
    server = YdbServer("memory://")
    server.start()
    try:
        url = "ydb://127.0.0.1:{port}/local?discovery=off"
        with _behind_a_network(url, server.port) as afar:
            yield afar
    finally:
        server.stop()


@contextmanager
def _dflockd() -> Iterator[Afar]:
    with InThread() as server, _behind_a_network("dflockd://127.0.0.1:{port}", server.port) as afar:
        yield afar


NETWORKED: dict[str, Callable[[], AbstractContextManager[Afar]]] = {
    "redis": _redis,
    "postgresql": _postgresql,
    "etcd": _etcd,
    "native": _native,
    "ydb": _ydb,
    "dflockd": _dflockd,
}
