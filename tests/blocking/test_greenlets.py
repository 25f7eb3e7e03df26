"""Programs whose threads gevent or eventlet has replaced with greenlets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import tenure
from tenure import blocking
from tests.blocking.helpers import until
from tests.engines.redis import servers as redis
from tests.ports import free_port

PATCHED = "from gevent import monkey\nmonkey.patch_all()\n"


@pytest.fixture(autouse=True)
def _with_gevent() -> None:
    pytest.importorskip("gevent", reason="pip install gevent")


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty store; that of Redis has a name that is looked up."""
    if request.param == "memory":
        yield "memory://greenlets"
    elif request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'greenlets.db'}"
    else:
        with redis.a_namespace() as url:
            yield url.replace("127.0.0.1", "localhost")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def output_of(program: str, *arguments: str) -> str:
    """What a program prints that gevent has patched."""
    done = run(PATCHED + textwrap.dedent(program), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_greenlets_take_turns_and_a_waiting_one_stops_no_other(store: str) -> None:
    program = """
        import sys, gevent
        from gevent.event import Event
        from tenure import blocking

        inside, free = [], Event()

        def work(number):
            with client.mutex("a").lock(timeout=60):
                inside.append(number)
                free.wait()  # the others wait for the lock meanwhile
                assert inside.pop() == number and not inside

        def let_them():
            while sum(map(len, (client.mutex("a").describe(waiters=True).waiters,))) < 4:
                gevent.sleep(0)
            free.set()

        with blocking.connect(sys.argv[1]) as client:
            workers = [gevent.spawn(work, number) for number in range(5)]
            gevent.joinall([*workers, gevent.spawn(let_them)], raise_error=True)
        print("done")
        """
    assert output_of(program, store) == "done\n"


def test_a_greenlet_that_computes_loses_no_lease(store: str) -> None:
    program = """
        import sys, time
        from tenure import blocking

        with blocking.connect(sys.argv[1]) as client, client.session(recovery_window=1) as session:
            with session.mutex("a").lock() as lease:
                end = time.monotonic() + 2.5
                while time.monotonic() < end:
                    pass
                print(lease.held)
                lease.check()
        """
    assert output_of(program, store) == "True\n"


def test_a_timeout_of_gevent_withdraws_the_request(store: str) -> None:
    program = """
        import sys, gevent
        from tenure import blocking

        with blocking.connect(sys.argv[1]) as client, client.mutex("a").lock():
            def wait():
                with gevent.Timeout(0.3, False):
                    client.mutex("a").lock()
            gevent.spawn(wait).get()
            print(len(client.mutex("a").describe(waiters=True).waiters))
        """
    assert output_of(program, store) == "0\n"


def test_a_signal_closes_the_clients_before_its_action(store: str) -> None:
    program = """
        import signal, sys
        from tenure import blocking

        def stop(number, frame):
            print("held:", [each.held for each in leases])

        signal.signal(signal.SIGTERM, stop)
        clients = [blocking.connect(sys.argv[1]) for _ in range(2)]
        for client in clients:
            client.release_on_signals()
        leases = [client.mutex(name).lock() for client, name in zip(clients, "ab")]
        signal.raise_signal(signal.SIGTERM)
        with blocking.connect(sys.argv[1]) as other:
            print("free:", [bool(other.mutex(name).try_lock()) for name in "ab"])
        """
    assert output_of(program, store) == "held: [False, False]\nfree: [True, True]\n"


def test_patched_after_the_first_use_is_an_error() -> None:
    done = run(
        "from tenure import blocking\n"
        "blocking.connect('memory://').close()\n" + PATCHED + "blocking.connect('memory://')\n"
    )
    assert done.returncode == 1
    assert "Unsupported: gevent has replaced threads after" in done.stderr


def test_threads_without_select_are_an_error_with_the_remedy() -> None:
    done = run(
        "from gevent import monkey\nmonkey.patch_all(select=False)\n"
        "from tenure import blocking\nblocking.connect('memory://')\n"
    )
    assert done.returncode == 1
    assert "Unsupported: gevent has replaced only one of threading and select" in done.stderr


def test_neither_threads_nor_select_patched_works_in_geventss_thread_pool() -> None:
    done = run(
        textwrap.dedent(
            """
            from gevent import monkey
            monkey.patch_all(thread=False, select=False)
            import gevent
            from tenure import blocking

            def work(number):
                with blocking.connect("memory://pool") as client:
                    with client.mutex("a").lock(timeout=30):
                        return number

            pool = gevent.get_hub().threadpool
            greenlets = [gevent.spawn(pool.apply, work, (number,)) for number in range(2)]
            gevent.joinall(greenlets, raise_error=True)
            print([each.value for each in greenlets])
            """
        )
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr


def test_eventlet_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = SimpleNamespace(is_monkey_patched=lambda part: part == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(tenure.Unsupported, match=r"eventlet has replaced.*use gevent"):
        blocking.connect("memory://")


WEB = """
import os, sys
from tenure import blocking

client = None

def app(environ, start_response):
    global client
    if client is None:
        client = blocking.connect(os.environ["STORE"])
    with client.mutex("page").lock(timeout=60) as lease:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [str(lease.fencing_token).encode()]
"""


def test_a_client_that_is_closed_leaves_no_descriptor_open(tmp_path: Path) -> None:
    program = """
        import os, sys
        from tenure import blocking

        def count():
            with blocking.connect(f"sqlite:///{sys.argv[1]}/jobs.db") as client:
                with client.mutex("m"), client.mutex("n"):
                    pass
            return len(os.listdir("/proc/self/fd"))

        print(len({count() for _ in range(5)}))
        """
    assert output_of(program, str(tmp_path)) == "1\n"


JOBS = """
import os
from celery import Celery
from tenure import blocking

app = Celery("jobs", broker="filesystem://", broker_transport_options={
    "data_folder_in": "queue", "data_folder_out": "queue", "store_processed": False})

@app.task
def work(number):
    with blocking.connect(os.environ["STORE"]) as client:
        with client.mutex("job").lock(timeout=60), open("done", "a") as file:
            file.write(f"{number}\\n")
"""


@contextmanager
def running(folder: Path, *command: str, store: str) -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-W", "ignore", "-m", *command]
    environment = {"STORE": store, "PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(program, cwd=folder, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_gunicorns_greenlets_serve_requests_in_turn(tmp_path: Path) -> None:
    pytest.importorskip("gunicorn", reason="pip install gunicorn")
    (tmp_path / "web.py").write_text(WEB, encoding="utf-8")
    port = free_port()
    url = f"http://127.0.0.1:{port}/"

    def get(_: int = 0) -> int:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.read())

    def answers() -> bool:
        try:
            return bool(get())
        except OSError:
            return False

    command = ("gunicorn", "-k", "gevent", "-w", "2", "-b", f"127.0.0.1:{port}", "web:app")
    store = f"sqlite:///{tmp_path / 'web.db'}"
    with running(tmp_path, *command, store=store), ThreadPoolExecutor(8) as pool:
        until(answers)
        tokens = [*pool.map(get, range(16))]
    assert len({*tokens}) == 16


@pytest.mark.exhaustive
def test_celerys_greenlets_carry_out_tasks_in_turn(tmp_path: Path) -> None:
    pytest.importorskip("celery", reason="pip install celery")
    (tmp_path / "jobs.py").write_text(JOBS, encoding="utf-8")
    (tmp_path / "queue").mkdir()
    store = f"sqlite:///{tmp_path / 'jobs.db'}"
    send = "import jobs\nfor number in range(5): jobs.work.delay(number)"
    subprocess.run([sys.executable, "-c", send], cwd=tmp_path, check=True)
    done = tmp_path / "done"
    command = ("celery", "-A", "jobs", "worker", "-P", "gevent", "-c", "4", "-l", "error")
    with running(tmp_path, *command, store=store):
        until(lambda: done.exists() and len(done.read_text().split()) == 5)
    assert sorted(done.read_text().split()) == list("01234")
