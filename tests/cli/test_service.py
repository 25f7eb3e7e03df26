"""`tenure service`: an instance is registered as long as it lives, and found by others."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.cli.programs import LISTENER, Tenure, alive, eventually, pid_of


def instances(tenure: Tenure) -> list[str]:
    return [each["data"] for each in tenure.json("service", "ls", "webs")["instances"]]


def test_it_is_registered_while_its_command_runs(tenure: Tenure) -> None:
    web = tenure.start(
        "service", "register", "webs", "10.0.0.1:80", "--", "sh", "-c", "echo there; read x; exit 5"
    )
    assert web.line() == "there"
    other = tenure.start("service", "register", "webs", "10.0.0.2:80")
    assert other.line() == "registered 10.0.0.2:80 as webs on /default"
    assert tenure.inside("service", "ls", "webs", "-q").stdout == "10.0.0.1:80\n10.0.0.2:80\n"
    lines = tenure.inside("service", "ls", "webs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ENDPOINT", "10.0.0.1:80", "10.0.0.2:80"]
    web.say()
    assert web.end() == (5, "")
    assert instances(tenure) == ["10.0.0.2:80"]
    other.signal(signal.SIGTERM)
    assert other.end() == (143, "")
    assert instances(tenure) == []
    assert "no instance of webs is registered" in tenure.inside("service", "ls", "webs").stdout


def test_a_killed_instance_is_gone_at_once(tenure: Tenure) -> None:
    web = tenure.start("service", "register", "webs", "a:1")
    web.line()
    web.signal(signal.SIGKILL)
    eventually(lambda: instances(tenure) == [])


@pytest.mark.parametrize("command", [[], ["--", sys.executable, "-c", LISTENER]])
def test_a_lost_registration_ends_it(tenure: Tenure, command: list[str]) -> None:
    web = tenure.start("service", "register", "webs", "a:1", *command)
    said = web.line()
    (instance,) = tenure.json("service", "ls", "webs")["instances"]
    assert tenure.inside("evict", "webs", str(instance["order_id"])).returncode == 0
    code, said_last = web.end()
    assert code == 79
    assert said_last.count("\n") == 1
    assert "'webs' on /default is lost: evicted" in said_last
    if command:
        assert not alive(pid_of(said))


def test_every_change_is_shown(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    plain = tenure.start("service", "watch", "webs", "--count", "3")
    told = tenure.start("service", "watch", "webs", "--json")
    assert plain.line().split(maxsplit=1)[1] == "webs  0 registered"
    assert json.loads(told.line())["instances"] == []
    web = tenure.start("service", "register", "webs", "a\x1b[2J")
    assert plain.line().split(maxsplit=1)[1] == r"webs  1 registered: a\x1b[2J"
    (instance,) = json.loads(told.line())["instances"]
    assert (instance["data"], instance["pid"]) == ("a\x1b[2J", web.process.pid)
    web.signal(signal.SIGINT)
    assert plain.line().split(maxsplit=1)[1] == "webs  0 registered"
    assert json.loads(told.line())["instances"] == []
    assert plain.end() == (0, "")
    assert tenure("service", "watch", "webs", "--once").stdout.endswith("0 registered\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["register", "webs"], 78, "missing argument 'ENDPOINT'"),
        (["register", "gpu", "a:1"], 78, "'gpu' on /default"),
        (["register", "webs", "a:1", "--", "no-such-command"], 127, "no-such-command"),
        (["register", "--recovery-window", "0", "webs", "a:1"], 78, "1 to 1800 seconds"),
        (["register", "--node", "/defualt", "webs", "a:1"], 73, "did you mean /default?"),
        (["ls", "gpu"], 78, "is a lasting semaphore, not a service"),
        (["watch", "gpu"], 78, "is a lasting semaphore, not a service"),
        (["ls", "webs", "--node", "/defualt"], 73, "did you mean /default?"),
        (["list"], 78, "did you mean 'ls'?"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "4")
    done = tenure.inside("service", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
