"""Processes that use the blocking API: their exit, their forks, their being stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenure import blocking
from tenure._client.loss import LOSS_EXIT_STATUS
from tests.blocking.helpers import is_free, sleeps, until, waiting
from tests.guarantees import SQLITE, guarantee

HEAD = """
import contextlib, os, signal, sys, threading, warnings
import tenure
from tenure import blocking
warnings.simplefilter("error")
url = sys.argv[1]
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'blocking.db'}"


@contextmanager
def program(url: str, text: str) -> Iterator[subprocess.Popen[str]]:
    """A program of its own; it is told to go on by a line, and says lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(text), url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ends(process: subprocess.Popen[str], status: int = 0, *, error: str = "") -> str:
    """Wait for its end; returns the rest of what it said."""
    process.wait(timeout=60)
    out, err = process.communicate()
    assert (process.returncode, error in err and bool(err) is bool(error)) == (status, True), err
    return out


def test_a_forgotten_client_is_closed_at_the_exit(url: str, eye: blocking.Client) -> None:
    text = """
    client = blocking.connect(url)
    lease = client.mutex("a").lock()

    def wait():
        with contextlib.suppress(tenure.TenureError, StopIteration):  # the exit closes the client
            next(client.election("e").observe())

    threading.Thread(target=wait, daemon=True).start()
    other = blocking.connect("memory://")
    print("held", flush=True)
    input()
    """
    with program(url, text) as process:
        assert says(process) == "held"
        assert not is_free(eye, "a")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        ends(process)
    assert eye.list_sessions() == () or len(eye.list_sessions()) == 0
    assert is_free(eye, "a")


def test_a_client_that_cannot_be_closed_at_the_exit_is_named_by_its_url(url: str) -> None:
    text = """
    import logging
    from tenure._client.client_core import ClientCore

    async def fail(self):
        raise OSError("the test fails it")

    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    client = blocking.connect("memory://jobs")
    client.list_nodes()
    ClientCore.aclose = fail
    """
    with program(url, text) as process:
        said = ends(process)
    assert "could not close a client: url=memory://jobs error=the test fails it" in said


def test_the_exit_does_not_wait_for_a_thread_that_waits(url: str, eye: blocking.Client) -> None:
    text = """
    def work():
        try:
            client.mutex("a").lock()
        except tenure.SessionClosed:
            pass  # as it must be
    client = blocking.connect(url)
    threading.Thread(target=work, daemon=True).start()
    input()
    """
    blocker = eye.mutex("a").lock()
    with program(url, text) as process:
        until(lambda: waiting(eye, "a") == 1)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        ends(process)
    assert waiting(eye, "a") == 0
    blocker.release()


def test_ctrl_c_ends_a_program_that_waits(url: str, eye: blocking.Client) -> None:
    text = """
    with blocking.connect(url) as client, client.mutex("a").lock():
        pass
    """
    blocker = eye.mutex("a").lock()
    with program(url, text) as process:
        until(lambda: waiting(eye, "a") == 1 and sleeps(process.pid))
        process.send_signal(signal.SIGINT)
        ends(process, -signal.SIGINT, error="KeyboardInterrupt")
    assert waiting(eye, "a") == 0
    blocker.release()


def test_a_loss_may_end_the_process(url: str, eye: blocking.Client) -> None:
    text = """
    client = blocking.connect(url)
    lease = client.mutex("a").lock(on_loss="exit")
    print(lease.fencing_token, flush=True)
    input()
    """
    with program(url, text) as process:
        eye.evict("/default", "a", int(says(process)))
        ends(process, LOSS_EXIT_STATUS, error="is lost")


@guarantee("stopped", "loss reported", "others proceed", on=SQLITE)
def test_a_program_that_was_stopped_for_too_long_is_told_at_its_next_call(
    url: str, eye: blocking.Client
) -> None:
    text = """
    with blocking.connect(url) as client:
        session = client.session(recovery_window=2)
        try:
            with session.mutex("a").lock() as lease:
                print("held", flush=True)
                input()
                client.list_nodes()
                print("not told", flush=True)
        except tenure.LeaseLost as loss:
            print("lost", lease.held, lease.loss is not None, flush=True)
    """
    with program(url, text) as process:
        assert says(process) == "held"
        os.kill(process.pid, signal.SIGSTOP)
        with eye.mutex("a").lock(timeout=60):  # granted when the window is over
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert says(process) == "lost False True"
            ends(process)


@guarantee("fork", "one owner", "kept", on=SQLITE)
def test_a_forked_child_is_told_and_its_parent_goes_on(url: str, eye: blocking.Client) -> None:
    text = """
    def refused(call):
        try:
            call()
        except tenure.Misuse as misuse:
            assert "forked" in str(misuse), misuse
        else:
            raise AssertionError(f"{call} works in a forked child")

    interval = sys.getswitchinterval()
    client = blocking.connect(url)
    watch = client.election("e").observe()
    next(watch)
    with client.mutex("a").lock() as lease:
        child = os.fork()
        if child == 0:
            assert sys.getswitchinterval() == interval
            for call in (
                client.list_nodes, client.mutex("b").lock, lease.release, lease.check,
                watch.__next__, client.close, client.session, lease.__enter__,
            ):
                refused(call)
            with blocking.connect(url) as mine, mine.mutex("c").lock():
                assert sys.getswitchinterval() == 0.0005
                assert mine.mutex("a").try_lock() is None
            assert sys.getswitchinterval() == interval
            sys.exit(7)  # through the block, whose end is not the child's
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        lease.check()
        assert client.mutex("a").try_lock() is None
        c = client.mutex("c").try_lock()
        assert c is not None
    client.close()
    print("done")
    """
    with program(url, text) as process:
        assert ends(process) == "done\n"
    assert is_free(eye, "a")


def test_a_child_forked_while_no_client_is_open_leaves_the_loop_alone(url: str) -> None:
    text = """
    with blocking.connect(url) as client:
        lease = client.mutex("a").lock()
    child = os.fork()
    if child == 0:
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    with blocking.connect(url) as client, client.mutex("a").lock() as lease:
        print("held", lease.held)
    """
    with program(url, text) as process:
        assert ends(process) == "held True\n"


def test_a_child_may_use_the_file_that_its_parents_threads_were_busy_with(url: str) -> None:
    """SQLite's memory, which a child gets a copy of, must not say that a lock is taken."""
    text = """
    client = blocking.connect(url)
    session = client.session()
    stopping = threading.Event()

    def be_busy():
        while not stopping.is_set():
            with session.mutex("busy").lock():
                pass

    threads = [threading.Thread(target=be_busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # what ends a child that hangs
            with blocking.connect(url) as mine, mine.mutex(f"child {number}").lock():
                os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
    stopping.set()
    for thread in threads:
        thread.join()
    client.close()
    """
    with program(url, text) as process:
        assert [says(process) for _ in range(10)] == ["0"] * 10
        ends(process)
