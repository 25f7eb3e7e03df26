"""`tenure node` and `tenure sem`: creating, changing and removing; and the line of a mistake."""

from __future__ import annotations

import pytest

from tests.cli.programs import Tenure


def test_a_node_from_its_creation_to_its_end(tenure: Tenure) -> None:
    assert tenure.inside("node", "create", "/billing", "--self-check-period", "2").returncode == 0
    assert tenure.inside("node", "create", "/billing", "--exist-ok").returncode == 0
    assert (
        tenure.inside("node", "alter", "/billing", "--read-consistency", "strict").returncode == 0
    )
    described = tenure.json("node", "describe", "/billing")
    assert described["config"]["self_check_period"] == 2
    assert described["config"]["read_consistency"] == "strict"
    assert "self check period: 2.0 s\n" in tenure.inside("node", "describe", "/billing").stdout
    assert [each["path"] for each in tenure.json("node", "ls")["nodes"]] == [
        "/billing",
        "/default",
    ]
    assert tenure.inside("node", "drop", "/billing").returncode == 0
    assert [line.split()[0] for line in tenure.inside("node", "ls").stdout.splitlines()] == [
        "NODE",
        "/default",
    ]


def test_a_node_shows_its_sessions(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/billing")
    assert "no sessions" in tenure.inside("node", "describe").stdout
    holder = tenure.hold()
    last = tenure.inside("node", "describe").stdout.splitlines()[-1].split()
    assert last[1] == "yes"
    assert str(holder.process.pid) in last
    (session,) = tenure.json("node", "describe")["session_list"]
    assert session["description"] == "tenure run sh"


def test_a_semaphore_from_its_creation_to_its_end(tenure: Tenure) -> None:
    assert tenure.inside("sem", "create", "config", "--limit", "3", "--data", "one").returncode == 0
    assert tenure.inside("sem", "create", "config", "--limit", "3", "--exist-ok").returncode == 0
    assert tenure.json("describe", "config")["data"] == "one"
    assert tenure.inside("sem", "update", "config", "--data", "two").returncode == 0
    assert tenure.json("describe", "config")["data"] == "two"
    file = tenure.folder / "data"
    file.write_bytes(b"\x00\xff")
    assert tenure.inside("sem", "update", "config", "--data-file", str(file)).returncode == 0
    assert tenure.json("describe", "config")["data_base64"] == "AP8="
    assert tenure("sem", "update", "config", "--data-file", "-", says="piped").returncode == 0
    assert tenure.json("describe", "config")["data"] == "piped"
    assert "data: piped\n" in tenure.inside("describe", "config").stdout
    assert tenure.inside("sem", "resize", "config", "6").returncode == 0
    assert tenure.json("describe", "config")["limit"] == 6
    assert tenure.inside("sem", "delete", "config").returncode == 0
    assert tenure.inside("describe", "config").returncode == 73


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["node", "create", "/default"], 73, "/default"),
        (["node", "create", "billing"], 78, "starts with '/'"),
        (["node", "create"], 78, "missing argument 'PATH'"),
        (["node", "drop", "/default"], 78, "cannot be dropped"),
        (["node", "drop", "/nowhere"], 73, "there is no node /nowhere"),
        (["node", "alter", "/nowhere"], 73, "there is no node /nowhere"),
        (["node", "describe", "/defualt"], 73, "(did you mean /default?)"),
        (["node", "crate", "/a"], 78, "did you mean 'create'?"),
        (["node", "create", "/a", "--read-consistency", "often"], 78, "'often' is not one of"),
        (["sem", "create", "gpu"], 78, "missing option '--limit'"),
        (["sem", "create", "gpu", "--limit", "0"], 78, "one or more"),
        (["sem", "create", "taken", "--limit", "2"], 73, "'taken'"),
        (["sem", "create", "taken", "--limit", "3", "--exist-ok"], 73, "2"),
        (["sem", "update", "taken"], 78, "--data TEXT or --data-file FILE"),
        (["sem", "update", "taken", "--data", "a", "--data-file", "-"], 78, "not both"),
        (["sem", "update", "taken", "--data-file", "missing"], 78, "missing"),
        (["sem", "update", "tekan", "--data", "x"], 73, "(did you mean 'taken'?)"),
        (["sem", "resize", "taken"], 78, "missing argument 'LIMIT'"),
        (["sem", "resize", "taken", "0"], 78, "one or more"),
        (["sem", "resize", "taken", str(2**53)], 78, "1 to 2^53-1"),
        (["sem", "resize", "tekan", "2"], 73, "(did you mean 'taken'?)"),
        (
            ["sem", "delete", "nobody"],
            73,
            "there is no 'nobody' on /default; 'tenure sem create' creates",
        ),
        (["describe"], 78, "missing argument 'NAME'"),
        (
            ["frobnicate"],
            78,
            "there are: run, ls, describe, why, deadlocks, top, console, watch",
        ),
        (["lss"], 78, "did you mean 'ls'?"),
        (["ls", "--josn"], 78, "--json"),
        (["--ulr", "x", "ls"], 78, "--url"),
        (["ls", "--url", f"sqlite:///{'x' * 300}"], 74, "too long"),
        (["--url", "", "ls"], 78, "URL"),
        (["--url", "nonsense", "ls"], 78, "'nonsense'"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    assert tenure.inside("sem", "create", "taken", "--limit", "2").returncode == 0
    done = tenure.inside(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message.lower() in done.stderr.lower()
    assert done.stderr.startswith("tenure: ")
    assert done.stderr.count("\n") == 1


def test_what_is_in_use_is_removed_by_force_only(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/billing")
    slot = ("run", "--semaphore", "gpu", "--limit", "1", "--node", "/billing")
    running = tenure.start(*slot, "--", "sh", "-c", "echo there; read x")
    assert running.line() == "there"
    for what in (["sem", "delete", "gpu", "--node", "/billing"], ["node", "drop", "/billing"]):
        done = tenure.inside(*what)
        assert done.returncode == 73
        assert "/billing" in done.stderr
    assert tenure.inside("node", "drop", "/billing", "--force").returncode == 0
    assert running.end()[0] == 79
