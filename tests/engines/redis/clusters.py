"""Redis clusters of the tests' own, whose slots can be moved and whose masters can be killed.

The nodes of a new cluster take two seconds until they accept writes. So most tests share one, with
a namespace for each, in a slot of its own.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import redis

from tenure.engines.redis.locating import ClusterNodes
from tenure.engines.redis.url import parse
from tests.clean_up import clean_up_with
from tests.engines.redis.helpers import PATIENCE
from tests.engines.redis.servers import Server, a_folder, free_port

_numbers = itertools.count(1)
_SLOTS = 16384


def slot_of(url: str) -> int:
    """The hash slot of a namespace."""
    return ClusterNodes(parse(url)).slot


class Cluster:
    """The nodes: masters, and behind them as many replicas, or none.

    Attributes:
        nodes: the processes, with the replicas behind the masters, in the same order.
        tls_ports: their ports for TLS, if there are any.
    """

    def __init__(self, nodes: list[Server], tls_ports: list[int]) -> None:
        self.nodes = nodes
        self.tls_ports = tls_ports

    def url(self, prefix: str = "", *nodes: Server, parameters: str = "") -> str:
        """Of some nodes, or all of them."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in nodes or self.nodes)
        name = prefix or f"test-{next(_numbers)}"
        return f"redis+cluster://{hosts}?fresh=true&prefix={name}{parameters}"

    def join(self, masters: int, buses: Sequence[str]) -> None:
        """Make a cluster of nodes that do not know each other, given their ports for it."""
        for number, node in enumerate(self.nodes[:masters]):
            first, last = (_SLOTS * each // masters for each in (number, number + 1))
            node.tell("CLUSTER", "ADDSLOTSRANGE", str(first), str(last - 1))
            node.tell("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for node, bus in zip(self.nodes[1:], buses[1:], strict=True):
            self.nodes[0].tell("CLUSTER", "MEET", "127.0.0.1", str(self.port_of(node)), bus)
        _await(lambda: all(_knows(each, len(self.nodes)) for each in self.nodes))
        for master, replica in zip(self.nodes, self.nodes[masters:], strict=False):
            replica.tell("CLUSTER", "REPLICATE", self.id_of(master))
        _await(lambda: all(_serves(each) for each in self.nodes))

    def port_of(self, node: Server) -> int:
        """The port for other nodes."""
        return self.tls_ports[self.nodes.index(node)] if self.tls_ports else node.port

    def id_of(self, node: Server) -> str:
        return _text(node.tell("CLUSTER", "MYID"))

    def master_of(self, url: str) -> Server:
        """The node that serves a namespace, as it says itself."""
        slot = slot_of(url)
        for node in self.nodes:
            with suppress(redis.ConnectionError):  # it was killed
                for line in _text(node.tell("CLUSTER", "NODES")).splitlines():
                    words = line.split()
                    if "myself,master" in words[2] and any(_has(each, slot) for each in words[8:]):
                        return node
        raise AssertionError(f"no node serves slot {slot}")

    def other_than(self, node: Server) -> Server:
        """Another master."""
        return next(
            each
            for each in self.nodes
            if each is not node and b"master" in _raw(each.tell("ROLE"))[0]
        )

    def begin_move(self, url: str, to: Server) -> None:
        """Have a slot on its way: its keys are at the former node."""
        slot, source = slot_of(url), self.master_of(url)
        to.tell("CLUSTER", "SETSLOT", str(slot), "IMPORTING", self.id_of(source))
        source.tell("CLUSTER", "SETSLOT", str(slot), "MIGRATING", self.id_of(to))

    def move_keys(self, url: str, source: Server, to: Server, most: int = 1_000_000) -> int:
        """Move keys of a slot; return how many there were."""
        found = source.tell("CLUSTER", "GETKEYSINSLOT", str(slot_of(url)), str(most))
        assert isinstance(found, list)
        for key in found:
            source.tell("MIGRATE", "127.0.0.1", str(self.port_of(to)), key, "0", "5000")
        return len(found)

    def end_move(self, url: str, source: Server, to: Server) -> None:
        """Move all keys, and have the new node serve the slot."""
        slot = str(slot_of(url))
        while self.move_keys(url, source, to):
            pass
        for node in (to, source):
            node.tell("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(to))

    def move(self, url: str, to: Server | None = None) -> Server:
        """Move a slot as `redis-cli --cluster reshard` does; return the new node."""
        source = self.master_of(url)
        to = to or self.other_than(source)
        self.begin_move(url, to)
        self.end_move(url, source, to)
        return to


def _raw(answer: object) -> list[bytes]:
    assert isinstance(answer, list)
    return answer


def _text(answer: object) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _has(words: str, slot: int) -> bool:
    first, _, last = words.partition("-")
    return first.isdecimal() and int(first) <= slot <= int(last or first)


@contextmanager
def a_cluster(
    *, masters: int = 3, replicas: bool = False, tls: tuple[str, ...] = ()
) -> Iterator[Cluster]:
    """A running cluster; with the options for TLS, it has ports for that too."""
    with ExitStack() as stack:
        nodes, tls_ports = [], []
        for _ in range(masters * (2 if replicas else 1)):
            clustered = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            clustered += ["--cluster-node-timeout", "1000"]
            if tls:
                tls_ports.append(free_port())
                clustered += ["--tls-port", str(tls_ports[-1]), *tls]
            folder = stack.enter_context(a_folder())
            node = Server(folder, *clustered, port=free_port())
            stack.enter_context(clean_up_with(node.kill))
            node.start()
            nodes.append(node)
        cluster = Cluster(nodes, tls_ports)
        cluster.join(masters, [node.options[3] for node in nodes])
        yield cluster


def _await(so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < until
        time.sleep(0.02)


def _knows(node: Server, number: int) -> bool:
    lines = _text(node.tell("CLUSTER", "NODES")).splitlines()
    return len(lines) == number and not any("handshake" in each for each in lines)


def _serves(node: Server) -> bool:
    role = _raw(node.tell("ROLE"))
    linked = role[0] != b"slave" or role[3] == b"connected"
    return linked and "cluster_state:ok" in _text(node.tell("CLUSTER", "INFO"))


@functools.cache
def shared() -> Cluster:
    """One that is started when a test first asks for it, and ends with the tests."""
    cluster_of_all = a_cluster()
    cluster = cluster_of_all.__enter__()
    atexit.register(cluster_of_all.__exit__, None, None, None)
    return cluster


@contextmanager
def a_namespace() -> Iterator[str]:
    """The URL of an empty namespace in the shared cluster."""
    yield shared().url(parameters="&max_window=1800")
