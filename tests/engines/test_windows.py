"""Programs without what Windows does not have: all stores work, and the rest says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click import Context

import tenure
from tenure import blocking
from tenure.cli.app import LazyGroup
from tenure.cli.app import tenure as command_line
from tenure.cli.mistakes import Mistake
from tests.engines.stores import stores
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENGINES = ("memory", "sqlite", "redis", "postgresql", "etcd", "tenure", "ydb", "dflockd")

PROGRAM = """
import asyncio, sys, threading
import tenure
from tenure import blocking

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        async with client.mutex("a") as lease:
            waiting = asyncio.create_task(client.mutex("a").lock(timeout=60))
            await asyncio.sleep(0)
        async with await waiting as second:
            print("in order:", lease.fencing_token < second.fencing_token)
        print("free again:", await client.mutex("a").try_lock() is not None)

with blocking.connect(sys.argv[1]) as client:
    with client.mutex("b") as lease:
        thread = threading.Thread(target=lambda: client.mutex("b").lock(timeout=60).release())
        thread.start()
    thread.join()
    print("in threads:", lease.fencing_token > 0)
with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
    runner.run(main())
asyncio.run(main())
"""


@contextmanager
def a_store(engine: str) -> Iterator[str]:
    """An empty store of an engine, at a port."""
    if engine == "redis":
        from tests.engines.redis.servers import Server

        with TemporaryDirectory() as folder:
            server = Server(Path(folder), port=free_port())
            server.start()
            try:
                yield f"redis://127.0.0.1:{server.port}?fresh=true"
            finally:
                server.stop()
    else:
        with stores(engine).empty() as url:
            yield url


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.as_on_windows", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_needs_nothing_of_unix(engine: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with a_store(engine) as url:
        ended = run(str(tmp_path / "program.py"), url)
    shown = ["in threads: True", "in order: True", "free again: True"]
    if engine in {"postgresql", "dflockd"}:  # wait for their sockets by themselves
        assert "asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)" in ended.stderr
    else:
        assert not ended.stderr
        shown += shown[1:]
    assert ended.stdout.splitlines() == shown


def test_sqlite_is_in_portable_mode(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    url = f"sqlite:///{tmp_path}/jobs.db"
    assert run(str(tmp_path / "program.py"), f"{url}?portable=true").returncode == 0
    assert run(str(tmp_path / "program.py"), url).returncode == 0
    with pytest.raises(tenure.EngineError, match="is in portable mode"), blocking.connect(url) as c:
        c.mutex("a").try_lock()
    ended = run(str(tmp_path / "program.py"), f"{url}?portable=false")
    assert "tenure.Unsupported: 'sqlite:///" in ended.stderr
    assert "this system has only the portable mode" in ended.stderr


def test_commands_for_a_file_work(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    for command in ("config set a b", "ls", "config get a", "doctor"):
        ended = run("-m", "tenure", "--url", url, *command.split())
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
    assert "portable: " in ended.stdout


def test_a_file_is_backed_up_and_restored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    backup = str(tmp_path / "backup")
    assert run("-m", "tenure", "--url", url, "config", "set", "a", "b").returncode == 0
    for command in (("backup", backup), ("backup", "--force", backup)):
        ended = run("-m", "tenure", "--url", url, *command)
        assert ended.returncode == 0, ended.stderr
    ended = run("-m", "tenure", "--url", url, "restore", "--force", backup)
    assert ended.returncode == 0, ended.stderr
    assert run("-m", "tenure", "--url", url, "config", "get", "a").stdout == "b"


def test_a_unix_socket_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run(str(tmp_path / "program.py"), "redis+unix:///run/redis.sock")
    assert "tenure.Unsupported: redis+unix:// needs Unix sockets" in ended.stderr


def test_every_command_of_unix_says_so() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        for each in LazyGroup.POSIX:
            with pytest.raises(Mistake, match=f"tenure {each} needs Linux or macOS"):
                LazyGroup().get_command(Context(command_line), each)
    ended = run("-m", "tenure", "run", "--help")
    assert ended.returncode == 78
    assert ended.stderr.startswith("tenure: tenure run needs Linux or macOS; on Windows")
    assert ended.stderr.count("\n") == 1


COMMANDS = ("ls", "config get a", "doctor", "man", "completion bash", "simulate --help")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_for_a_server_has_no_traceback(command: str) -> None:
    with a_store("redis") as url:
        ended = run("-m", "tenure", "--url", url, *command.split())
    assert "Traceback" not in ended.stderr
    assert "defect" not in ended.stderr
