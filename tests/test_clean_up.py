"""A forked child leaves to its parent what its parent has opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clean_up import clean_up_with

ROOT = Path(__file__).parent.parent

FIXTURES = {
    "redis": "from tests.engines.redis.servers import a_server as fixture",
    "etcd": "from tests.engines.etcd.servers import a_cluster as fixture",
    "redis of the fences": "from tests.fencing.servers import a_redis as fixture",
    "postgresql": "from tests.fencing.servers import a_postgres as fixture",
}

# The child drops the suspended fixture, so that what is left of it runs.
PROGRAM = """
import os, signal, sys
import pytest
from tests.hang_guard.guard import descendants, is_alive

try:
    of_a_server = fixture()
    of_a_server.__enter__()
except pytest.skip.Exception as skipped:
    print("skipped:", skipped)
    sys.exit()
servers = descendants(os.getpid())
child = os.fork()
if child == 0:
    signal.alarm(20)
    del of_a_server
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
assert all(map(is_alive, servers)), "the child has ended its parent's server"
of_a_server.__exit__(None, None, None)
assert not any(map(is_alive, servers)), "the server outlives its fixture"
"""


def test_it_is_called_when_the_block_ends() -> None:
    done: list[str] = []
    with clean_up_with(lambda: done.append("once")):
        assert done == []
    assert done == ["once"]


def test_it_is_called_when_the_block_fails() -> None:
    done: list[str] = []
    with pytest.raises(KeyError), clean_up_with(lambda: done.append("once")):
        raise KeyError("in the block")
    assert done == ["once"]


@pytest.mark.parametrize("name", FIXTURES)
def test_a_forked_child_ends_no_server_of_its_parent(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIXTURES[name] + PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.stdout.startswith("skipped:"):
        pytest.skip(done.stdout.removeprefix("skipped:").strip())
    assert done.returncode == 0, done.stderr
