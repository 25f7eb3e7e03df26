"""`tenure why` and `tenure deadlocks`: the chain of waits, for people and for scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.programs import HOST, Running, Tenure, eventually

Start = Callable[..., Running]


@pytest.fixture
def start(tenure: Tenure, request: pytest.FixtureRequest) -> Start:
    """Start a program whose threads take pairs of locks; it is inside the first ones."""

    def started(*pairs: str, on_deadlock: str = "wait") -> Running:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.blocked", tenure.url, on_deadlock, *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=tenure.environment,
        )

        def end() -> None:
            process.kill()
            process.communicate()

        request.addfinalizer(end)
        running = Running(process)
        for _ in pairs:
            assert running.line().startswith("inside ")
        return running

    return started


def test_a_chain_leads_to_the_holder_at_the_root(tenure: Tenure, start: Start) -> None:
    root = tenure.hold(name="b")
    middle = start("ab")
    middle.say()
    last = tenure.start("run", "--lock", "a", "--", "true")
    eventually(lambda: tenure.json("why", "a")["tasks"])
    eventually(lambda: tenure.waiting("a"))

    seen = tenure("why", "a").stdout
    assert re.fullmatch(
        "a  mutex on /default, held, 1 waiting\n"
        rf"1\. waits for \S+ s: .*pid {last.process.pid} on {HOST}.* \(token \d+\)\n"
        rf"held for .+ by .*pid {middle.process.pid} on {HOST} \(token \d+\)\n"
        r"  session \d+: attached, silent for .+, expires in .+ unless it is renewed\n"
        r"  task Thread-\d+ \(take\) waits for .+ s for b\n"
        rf"    held for .+ by .*pid {root.process.pid} on {HOST}.* \(token \d+\)\n"
        r"      session \d+: attached, .+\n"
        r"      no wait of it is known\n",
        seen,
    ), seen

    graph = tenure.json("why", "a")
    assert [each["name"] for each in graph["semaphores"]] == ["a", "b"]
    assert [each["pid"] for each in graph["roots"]] == [root.process.pid]
    (task,) = graph["tasks"]
    assert (task["name"], task["pid"], task["timeout"]) == ("b", middle.process.pid, False)
    assert task["leases"] == [
        {"name": "a", "order_id": graph["semaphores"][0]["owners"][0]["order_id"]}
    ]
    assert len(graph["sessions"]) == 3
    assert (graph["deadlocks"], graph["complete"]) == ([], True)
    done = tenure("deadlocks")
    assert (done.returncode, done.stdout) == (0, "no deadlock\n")


def test_one_waiter_or_holder_is_explained_by_its_token(tenure: Tenure, start: Start) -> None:
    root = tenure.hold(name="b")
    middle = start("ab")
    middle.say()
    waiters = []
    for number in range(1, 4):
        waiters.append(tenure.start("run", "--lock", "a", "--", "true").process.pid)
        eventually(lambda number=number: tenure.waiting("a") == number)  # type: ignore[misc]
    eventually(lambda: tenure.json("why", "a")["tasks"])
    described = tenure.json("describe", "a")
    holder = described["owners"][0]["order_id"]
    second = described["waiters"][1]["order_id"]

    seen = tenure("why", "a", "--token", str(second)).stdout
    assert re.fullmatch(
        "a  mutex on /default, held, 3 waiting\n"
        rf"waits for \S+ s, place 2 of 3: .*pid {waiters[1]} on {HOST}.* \(token {second}\)\n"
        r"  session \d+: attached, .+\n"
        r"ahead of it, 1 waiting:\n"
        rf"1\. waits for \S+ s: .*pid {waiters[0]} on {HOST}.* \(token \d+\)\n"
        rf"held for .+ by .*pid {middle.process.pid} on {HOST} \(token {holder}\)\n"
        r"  session \d+: attached, .+\n"
        r"  task Thread-\d+ \(take\) waits for .+ s for b\n"
        rf"    held for .+ by .*pid {root.process.pid} on {HOST}.* \(token \d+\)\n"
        r"      session \d+: attached, .+\n"
        r"      no wait of it is known\n",
        seen,
    ), seen
    seen = tenure("why", "a", "--token", str(holder)).stdout
    assert re.fullmatch(
        r"a  mutex on /default, held, 3 waiting\nheld for .+\n  session .+\n"
        r"  task .+ waits for .+ s for b\n    held for .+\n      session .+\n"
        r"      no wait of it is known\n",
        seen,
    ), seen

    chain = tenure.json("why", "a", "--token", str(second))
    assert (chain["order_id"], chain["place"]) == (second, 2)
    assert [each["pid"] for each in chain["semaphores"][0]["waiters"]] == waiters[:2]
    assert chain["semaphores"][0]["waiting"] == 3
    assert [each["pid"] for each in chain["roots"]] == [root.process.pid]
    chain = tenure.json("why", "a", "--token", str(holder))
    assert (chain["order_id"], chain["place"]) == (holder, None)
    assert chain["semaphores"][0]["waiters"] == []
    assert [each["name"] for each in chain["semaphores"]] == ["a", "b"]
    done = tenure.inside("why", "a", "--token", "7")
    assert (done.returncode, done.stdout) == (73, "")
    assert f"'a' on /default has no owner or waiter 7; there are: {holder}, " in done.stderr


def test_a_deadlock_is_listed_until_it_ends(tenure: Tenure, start: Start) -> None:
    one, two = start("ab"), start("ba")
    one.say()
    two.say()
    eventually(lambda: tenure.inside("deadlocks").returncode == 72)
    done = tenure.inside("deadlocks", "/default", "--json")
    assert done.returncode == 72
    (deadlock,) = json.loads(done.stdout)["deadlocks"]
    assert deadlock["node"] == "/default"
    assert {each["pid"] for each in deadlock["tasks"]} == {one.process.pid, two.process.pid}
    lines = tenure("deadlocks").stdout.splitlines()
    assert lines[0] == "deadlock on /default"
    assert re.search(
        rf"pid {one.process.pid} on {HOST}, task Thread-\d+ \(take\), is inside a and waits for b",
        lines[1] + lines[2],
    )
    seen = tenure("why", "b").stdout
    assert "deadlock: none of these tasks can be granted what it waits for\n" in seen
    assert "waits for b, which is shown above" in re.sub(r" for [\d.]+ s", "", seen)

    two.process.kill()
    assert one.line() == "inside b too"
    assert tenure.json("deadlocks")["deadlocks"] == []


def test_the_youngest_wait_of_two_programs_raises(tenure: Tenure, start: Start) -> None:
    one, two = start("ab", on_deadlock="raise"), start("ba", on_deadlock="raise")
    one.say()
    eventually(lambda: tenure.waiting("b") == 1)
    two.say()
    assert two.line().startswith("deadlock: mutex 'a' on /default: not acquired, because of a")
    assert one.line() == "inside b too"
    assert (one.end()[0], two.end()[0]) == (0, 0)


def test_two_threads_of_a_program_are_two(tenure: Tenure, start: Start) -> None:
    """One of them holds what the other program waits for, and the other one waits for that one."""
    root = tenure.hold(name="x")
    one, two = start("ax", "cb", on_deadlock="raise"), start("ba", on_deadlock="raise")
    for each in (one, two):
        each.say()
    eventually(lambda: len(tenure.json("why", "b")["tasks"]) == 3)
    assert tenure.json("deadlocks")["deadlocks"] == []
    root.say("0")
    assert {one.line(), one.line()} == {"inside x too", "inside b too"}
    assert two.line() == "inside a too"


def test_mistakes_are_named(tenure: Tenure) -> None:
    done = tenure.inside("deadlocks")
    assert (done.returncode, done.stdout) == (0, "no deadlock\n")
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    assert tenure.inside("why", "gpu").stdout == (
        "gpu  semaphore on /default, 0 of 2, none waiting\nit has no holder\n"
    )
    done = tenure.inside("why", "gpo")
    assert (done.returncode, done.stdout) == (73, "")
    assert "did you mean 'gpu'?" in done.stderr
    done = tenure.inside("deadlocks", "/missing")
    assert done.returncode == 73
    assert "there is no node /missing" in done.stderr
    assert tenure.inside("deadlocks", "/default").stdout == "no deadlock on /default\n"
    done = tenure.inside("why", "gpu", "--token", "7")
    assert done.returncode == 73
    assert "no owner or waiter 7; it has no holder and no waiter" in done.stderr
    done = tenure.inside("why", "gpu", "--token", "none")
    assert done.returncode == 78
    assert "'none' is not a whole number, one or more" in done.stderr
