"""What the service manager hears, and the sockets that it hands over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.server.process import Notifier, passed_sockets


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        yield listening


def test_it_hears_that_the_server_is_ready_alive_and_on_its_way_out(
    manager: socket.socket,
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.ready("listening at\na b")
    notifier.alive()
    notifier.reloading(12.5)
    notifier.stopping("draining")
    heard = [manager.recv(1000) for _ in range(4)]
    assert heard == [
        b"READY=1\nSTATUS=listening at a b",
        b"WATCHDOG=1",
        b"RELOADING=1\nMONOTONIC_USEC=12500000",
        b"STOPPING=1\nSTATUS=draining",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("")  # the kernel names it
        name = listening.getsockname()
        Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}).alive()
        assert listening.recv(100) == b"WATCHDOG=1"


def test_nobody_to_tell_is_no_harm(tmp_path: Path) -> None:
    Notifier({}).ready("on")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("on")


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_signs_of_life_come_twice_in_the_time_that_is_given(
    variables: dict[str, str], seconds: float | None
) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/nowhere", **variables}).watchdog == seconds
    assert Notifier(variables).watchdog is None


TAKES = """
import os, sys
os.dup2(int(sys.argv[1]), 3)  # where systemd would have put it
from tenure.server.process import passed_sockets
os.environ["LISTEN_PID"] = str(os.getpid())
taken = passed_sockets(os.environ)
print([(each.getsockname()[1], os.get_inheritable(each.fileno())) for each in taken])
print(passed_sockets(os.environ), [name for name in os.environ if name.startswith("LISTEN_")])
"""


def test_sockets_that_are_passed_are_taken_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", TAKES, str(first.fileno())],
            pass_fds=[first.fileno()],
            env={**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "tenure.socket"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.splitlines() == [f"[({port}, False)]", "[] []"]


def test_sockets_for_another_process_are_left_alone() -> None:
    assert passed_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == []
    assert passed_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) == []
