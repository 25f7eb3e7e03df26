"""A run of pytest that hangs ends, and says during which test, wherever it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import eventually
from tests.hang_guard.guard import descendants, is_alive

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parent.parent.parent

CONFTEST = """
import os, signal, sys, threading, time
import pytest
from tests.hang_guard.plugin import HangGuard

def pytest_configure(config):
    config.pluginmanager.register(HangGuard(config))
"""

HEAD = """
import asyncio, atexit, os, signal, threading, time
import pytest

pytestmark = pytest.mark.timeout(1)

def hang():
    "No exception ends it."
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass

def test_before():
    pass
"""

IN_A_TEST = """
def test_it():
    time.sleep(3600)
"""

IN_A_TEST_THAT_SWALLOWS_ITS_FAILURE = """
def test_it():
    hang()
"""

IN_A_FIXTURE = """
@pytest.fixture
def it():
    hang()

def test_it(it):
    pass
"""

IN_THE_END_OF_A_FIXTURE = """
@pytest.fixture
def it():
    yield
    hang()

def test_it(it):
    pass
"""

IN_THE_END_OF_A_FIXTURE_OF_THE_SESSION = """
@pytest.fixture(scope="session")
def it():
    yield
    hang()

def test_it(it):
    pass
"""

IN_A_FINALIZER = """
class Hanging:
    def __del__(self):
        hang()

def test_it():
    Hanging()
"""

IN_A_THREAD_THAT_THE_TEST_WAITS_FOR = """
def test_it():
    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    thread.join()
"""

IN_ANOTHER_TASK = """
async def never_cancelled():
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass

async def main():
    task = asyncio.create_task(never_cancelled())
    await asyncio.sleep(3600)

def test_it():
    asyncio.run(main())
"""

WITH_SIGNALS_BLOCKED = """
def test_it():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(3600)
"""


IN_C_WITH_A_FORKED_CHILD = """
@pytest.mark.filterwarnings("ignore:This process")
def test_it(tmp_path):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    child = os.fork()
    if child == 0:
        hang()
    print(f"child {child}", file=open(os.environ["CHILD"], "w"), flush=True)
    os.waitpid(child, 0)
"""

IN_A_THREAD_OF_ITS_OWN = """
def test_it():
    threading.Thread(target=hang).start()
"""

AFTER_THE_TESTS = """
def test_it():
    atexit.register(hang)
"""

WHEN_IMPORTED = """
hang()
"""


def pytest_runs(
    folder: Path, text: str, *options: str, limit: float = 30, conftest: str = CONFTEST
) -> tuple[int, str]:
    """A run of pytest on a test file: its exit status, and what it printed."""
    (folder / "pytest.ini").write_text(f"[pytest]\ntimeout = {limit}\ntimeout_method = signal\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_hanging.py").write_text(HEAD + text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CHILD": str(folder / "child")},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(IN_A_TEST, id="a test"),
        pytest.param(IN_A_TEST_THAT_SWALLOWS_ITS_FAILURE, id="a test that swallows its failure"),
        pytest.param(IN_A_FIXTURE, id="a fixture"),
        pytest.param(IN_THE_END_OF_A_FIXTURE, id="the end of a fixture"),
        pytest.param(IN_THE_END_OF_A_FIXTURE_OF_THE_SESSION, id="the end of the session's fixture"),
        pytest.param(IN_A_FINALIZER, id="a finalizer"),
        pytest.param(IN_A_THREAD_THAT_THE_TEST_WAITS_FOR, id="a thread"),
        pytest.param(IN_A_THREAD_OF_ITS_OWN, id="a thread that it leaves behind"),
        pytest.param(IN_ANOTHER_TASK, id="another task"),
        pytest.param(WITH_SIGNALS_BLOCKED, id="with signals blocked"),
    ],
)
def test_a_run_that_hangs_ends_and_names_the_test(tmp_path: Path, text: str) -> None:
    limit = 5 if text is IN_A_THREAD_OF_ITS_OWN else 30
    status, printed = pytest_runs(tmp_path, text, limit=limit)
    assert status != 0, printed
    assert "test_hanging.py::test_it" in printed, printed


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(IN_A_TEST, id="a test"),
        pytest.param(IN_THE_END_OF_A_FIXTURE_OF_THE_SESSION, id="the end of the session's fixture"),
        pytest.param(IN_ANOTHER_TASK, id="another task"),
    ],
)
def test_a_worker_that_hangs_ends_and_the_run_names_the_test(tmp_path: Path, text: str) -> None:
    status, printed = pytest_runs(tmp_path, text, "-n", "1")
    assert status != 0, printed
    assert "FAILED test_hanging.py::test_it" in printed, printed


def test_the_stacks_of_a_run_that_is_ended_are_printed(tmp_path: Path) -> None:
    _, printed = pytest_runs(tmp_path, WITH_SIGNALS_BLOCKED)
    assert "HANGS: test_hanging.py::test_it: not over after 2 s" in printed
    assert 'test_hanging.py", line' in printed
    assert " in test_it\n" in printed


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_a_forked_child_does_not_outlive_the_run_that_is_ended(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """It keeps the pipes open by which pytest-xdist hears of the worker's end."""
    status, printed = pytest_runs(tmp_path, IN_C_WITH_A_FORKED_CHILD, *options)
    assert status != 0, printed
    assert "test_hanging.py::test_it" in printed, printed
    child = int((tmp_path / "child").read_text().split()[1])
    eventually(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        pytest.param(WHEN_IMPORTED, "the collection of tests", id="the collection"),
        pytest.param(AFTER_THE_TESTS, "the end of the process, after all tests", id="the exit"),
    ],
)
def test_a_run_that_hangs_outside_the_tests_says_where(
    tmp_path: Path, text: str, phase: str
) -> None:
    status, printed = pytest_runs(tmp_path, text, limit=3)
    assert status != 0, printed
    assert f"HANGS: {phase}: not over after 6 s" in printed, printed
    assert " in hang\n" in printed, printed


RECORDER = """
import os, sys
from pathlib import Path
file = Path(__file__).with_name(f"told-{os.getppid()}")
file.write_bytes(sys.stdin.buffer.read())
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_a_process_may_be_idle_between_and_after_its_tests(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A worker waits for the last test of another one, which may take longer than any limit."""
    recorder = tmp_path / "recorder.py"
    recorder.write_text(RECORDER)
    conftest = CONFTEST.replace("HangGuard(config)", f"HangGuard(config, {str(recorder)!r})")
    status, printed = pytest_runs(tmp_path, "", *options, conftest=conftest)
    assert status == 0, printed
    told = sorted(file.read_text().splitlines() for file in tmp_path.glob("told-*"))
    begin, end = "60.0 the collection of tests", "60.0 the end of the session"
    exits = "60.0 the end of the process, after all tests"
    idle, test = "0 between tests", "2.0 test_hanging.py::test_before"
    if options:
        after = "0 after the tests of this worker"
        assert told == [[begin, idle, test, idle, end, after], [begin, idle, end, exits]]
    else:
        assert told == [[begin, idle, test, idle, end, exits]]


def test_descendants_are_children_and_theirs() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        sleeps = int(shell.stdout.readline())
        try:
            assert descendants(shell.pid) == {sleeps}
            assert {shell.pid, sleeps} <= descendants(os.getpid())
        finally:
            os.kill(sleeps, signal.SIGKILL)
            shell.kill()
    eventually(lambda: not is_alive(sleeps))
