"""etcd's servers of the tests' own: members that can be stopped, killed, cut off and started again.

Where there is no etcd, the tests that need one are skipped, and say with which command they would
not be. A member's data lies in memory where the machine has a folder for that: what is tested is
what happens between members, not whether etcd writes to a disk.

What tests ask of a member by themselves goes through its JSON gateway, and what they want to know
of it (is it healthy, does it lead, how much has it done) through its page of metrics, which needs
neither password nor certificate.
"""

from __future__ import annotations

import atexit
import base64
import functools
import http.client
import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clean_up import clean_up_with
from tests.ports import free_port
from tests.server.certificates import Authority, Pair

__all__ = [
    "Cluster",
    "Member",
    "a_cluster",
    "a_prefix",
    "free_port",
    "program",
    "shared",
    "version",
]

PATIENCE = 60.0
"""Seconds in which members on a busy machine start, elect a leader, or end."""

_LOOK = 0.02
"""Seconds between two looks at what nobody tells of."""

_numbers = itertools.count(1)


def program(name: str) -> str:
    """Where a program of etcd's is: in $ETCD_BIN, if that is set, else in PATH."""
    found = shutil.which(name, path=os.environ.get("ETCD_BIN"))
    if found is None:
        pytest.skip(f"no {name} here: apt-get install etcd-server")
    return found


@functools.cache
def version() -> tuple[int, ...]:
    """The version of etcd."""
    told = subprocess.run(
        [program("etcd"), "--version"], capture_output=True, text=True, check=True
    )
    return tuple(int(each) for each in told.stdout.splitlines()[0].split()[-1].split("."))


class Member:
    """One process.

    Args:
        folder: for its data and its log.
        name: its name in the cluster.
        options: of etcd, beside those that every one gets here.
        secrets: a certificate and its key, and the authority of those of clients; for TLS.

    Attributes:
        client: the port for clients.
        peer: the port for other members.
    """

    def __init__(
        self, folder: Path, name: str, *options: str, secrets: tuple[Pair, str] | None = None
    ) -> None:
        self.folder = folder
        self.name = name
        self.client = free_port()
        self.peer = free_port()
        self.secrets = secrets
        self._metrics = free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.secrets is None else "https"

    @property
    def address(self) -> str:
        """For clients, as in the URL of an engine."""
        return f"127.0.0.1:{self.client}"

    @property
    def runs(self) -> bool:
        return self._process is not None

    def launch(self, cluster: str) -> None:
        """Start it, and do not wait."""
        assert self._process is None
        peer, client = f"http://127.0.0.1:{self.peer}", f"{self.scheme}://{self.address}"
        secrets: tuple[str, ...] = ()
        if self.secrets is not None:
            pair, authority = self.secrets
            secrets = (
                *("--cert-file", pair.cert, "--key-file", pair.key),
                *("--client-cert-auth", "--trusted-ca-file", authority),
            )
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(program("etcd"), "--name", self.name),
                    *("--data-dir", str(self.folder / self.name)),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--listen-metrics-urls", f"http://127.0.0.1:{self._metrics}"),
                    *("--initial-cluster", cluster, "--initial-cluster-state", "new"),
                    *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "warn"),
                    *secrets,
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_until_healthy(self) -> None:
        """Return when it knows of a leader, and answers."""
        until = time.monotonic() + PATIENCE
        while not self.healthy():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > until:
                log = (self.folder / f"{self.name}.log").read_text()
                pytest.fail(f"{self.name} does not start:\n{log[-3000:]}")
            time.sleep(_LOOK)

    def stop(self) -> None:
        """End it as it wishes to be ended. Safe to call twice."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once. Safe to call twice."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def healthy(self) -> bool:
        """Whether it answers, and knows of a leader."""
        try:
            with urllib.request.urlopen(self._page("health"), timeout=2) as answer:
                told: object = json.load(answer)["health"]
                return told == "true"
        except (OSError, http.client.HTTPException):
            return False

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or those with one such as ``type="unary"``.

        It is 0 where it does not exist.

        Raises:
            OSError: the member does not answer.
        """
        with urllib.request.urlopen(self._page("metrics"), timeout=2) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"{name} ", f"{name}{{")) and label in line
        )

    def _page(self, name: str) -> str:
        return f"http://127.0.0.1:{self._metrics}/{name}"

    def ask(self, path: str, request: dict[str, object], *, token: str = "") -> dict[str, object]:
        """What it answers to a call through its gateway.

        Args:
            path: of the call, after ``/v3/``, such as ``kv/compaction``.
            request: its fields; 64-bit numbers are text there, bytes are base64.
            token: of a user who has authenticated.

        Raises:
            urllib.error.HTTPError: it refuses.
        """
        asked = urllib.request.Request(
            f"{self.scheme}://{self.address}/v3/{path}", json.dumps(request).encode()
        )
        if token:
            asked.add_header("Authorization", token)
        context = None
        if self.secrets is not None:
            pair, authority = self.secrets
            context = ssl.create_default_context(cafile=authority)
            context.load_cert_chain(pair.cert, pair.key)
        with urllib.request.urlopen(asked, timeout=10, context=context) as answer:
            told: dict[str, object] = json.load(answer)
            return told


class Cluster:
    """Members that belong together.

    Attributes:
        members: all of them, running or not.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    @property
    def url(self) -> str:
        """Of all its members, for programs; no certificates, no password."""
        scheme = "etcd" if self.members[0].secrets is None else "etcds"
        return f"{scheme}://{','.join(member.address for member in self.members)}"

    @property
    def plan(self) -> str:
        """As every member is told who belongs to it."""
        return ",".join(f"{each.name}=http://127.0.0.1:{each.peer}" for each in self.members)

    def start(self) -> None:
        """Start whoever does not run, and wait until all are healthy."""
        for member in self.members:
            if not member.runs:
                member.launch(self.plan)
        for member in self.members:
            member.wait_until_healthy()

    def heal(self) -> None:
        """Have everybody run, and go on."""
        for member in self.members:
            if member.runs:
                member.resume()
        self.start()

    def kill(self) -> None:
        """End everybody at once. Safe to call twice."""
        for member in self.members:
            member.kill()

    def leader(self) -> Member:
        """Who leads, by its own word; waits until there is one.

        Nobody is asked who is stopped: call it before you stop somebody.
        """
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for member in self.members:
                if member.runs and member.metric("etcd_server_is_leader") == 1:
                    return member
            time.sleep(_LOOK)
        pytest.fail("nobody leads")

    def followers(self) -> list[Member]:
        """Who does not lead."""
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def ask(self, path: str, request: dict[str, object], *, token: str = "") -> dict[str, object]:
        """What the first member that is well says; see `Member.ask`."""
        running = [member for member in self.members if member.runs]
        # One that is full, or alone, is not healthy.
        member = next(filter(Member.healthy, running), running[0])
        return member.ask(path, request, token=token)

    # What an administrator does

    def revision(self) -> int:
        """The revision of the store."""
        told = self.ask("kv/range", {"key": _bytes("\0"), "count_only": True})
        header = told["header"]
        assert isinstance(header, dict)
        return int(header["revision"])

    def compact(self, revision: int | None = None) -> None:
        """Forget the history before a revision; all of it when none is said."""
        self.ask(
            "kv/compaction",
            {"revision": str(self.revision() if revision is None else revision), "physical": True},
        )

    def leases(self) -> list[int]:
        """All leases, sorted."""
        told = self.ask("lease/leases", {}).get("leases", [])
        assert isinstance(told, list)
        return sorted(int(each["ID"]) for each in told)

    def revoke(self, lease: int) -> None:
        """End a lease, with all keys under it."""
        self.ask("lease/revoke", {"ID": str(lease)})

    def keys(self, prefix: str = "") -> dict[str, int]:
        """All keys with a prefix, and the lease of each, or 0."""
        told = self.ask("kv/range", _under(prefix) | {"keys_only": True}).get("kvs", [])
        assert isinstance(told, list)
        return {
            base64.b64decode(each["key"]).decode("utf-8", "backslashreplace"): int(
                each.get("lease", 0)
            )
            for each in told
        }

    def delete(self, prefix: str) -> int:
        """Delete all keys with a prefix; how many there were."""
        told = self.ask("kv/deleterange", _under(prefix)).get("deleted", "0")
        assert isinstance(told, str)
        return int(told)

    def make_space(self) -> None:
        """Compact and defragment every member, and end the alarm of those that were full."""
        self.compact()
        for member in self.members:
            member.ask("maintenance/defragment", {})
        for member in self.members:
            told = member.ask("maintenance/alarm", {"action": "GET"}).get("alarms", [])
            assert isinstance(told, list)
            for alarm in told:
                member.ask("maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    def have_users(self, **passwords: str) -> None:
        """Have users from now on, each of whom may do everything; one of them is root."""
        self.ask("auth/role/add", {"name": "root"})
        for name, password in passwords.items():
            self.ask("auth/user/add", {"name": name, "password": password})
            self.ask("auth/user/grant", {"user": name, "role": "root"})
        self.ask("auth/enable", {})

    def token(self, name: str, password: str) -> str:
        """What a user gets who says the password."""
        told = self.ask("auth/authenticate", {"name": name, "password": password})["token"]
        assert isinstance(told, str)
        return told


def _bytes(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _under(prefix: str) -> dict[str, object]:
    """The range of all keys with a prefix."""
    if not prefix:
        return {"key": _bytes("\0"), "range_end": _bytes("\0")}
    first = prefix.encode()
    last = first[:-1] + bytes([first[-1] + 1])
    return {
        "key": base64.b64encode(first).decode(),
        "range_end": base64.b64encode(last).decode(),
    }


@contextmanager
def a_folder(*, on_disk: bool = False) -> Iterator[Path]:
    """One in memory, if there is one and a disk is not asked for."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() and not on_disk else None
    folder = Path(tempfile.mkdtemp(prefix="tenure-", dir=place))
    with clean_up_with(lambda: shutil.rmtree(folder, ignore_errors=True)):
        yield folder


@contextmanager
def a_cluster(
    members: int = 1, *options: str, tls: bool = False, on_disk: bool = False
) -> Iterator[Cluster]:
    """A running cluster; the block may stop members and start them again.

    Args:
        members: how many.
        options: of etcd, for each.
        tls: whether clients need a certificate of the authority that `Member.secrets` names.
        on_disk: whether every commit waits for a disk.
    """
    with a_folder(on_disk=on_disk) as folder:
        secrets = None
        if tls:
            authority = Authority(folder)
            secrets = authority.signs("member"), authority.cert
        cluster = Cluster(
            [Member(folder, f"m{n}", *options, secrets=secrets) for n in range(1, members + 1)]
        )
        with clean_up_with(cluster.kill):
            cluster.start()
            yield cluster


@functools.cache
def shared() -> Cluster:
    """One member, started when a test first asks for it; it ends with the tests."""
    cluster_of_all = a_cluster()
    cluster = cluster_of_all.__enter__()
    atexit.register(cluster_of_all.__exit__, None, None, None)
    return cluster


@contextmanager
def a_prefix(parameters: str = "") -> Iterator[str]:
    """The URL of a part of the shared member in which nothing has happened yet."""
    more = f"&{parameters}" if parameters else ""
    yield f"{shared().url}?prefix=test-{next(_numbers)}{more}"
