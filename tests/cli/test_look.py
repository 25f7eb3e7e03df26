"""`tenure ls` and `tenure describe`: what a person sees, and what a script reads."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest

import tenure as tenure_package
from tests.cli.programs import HOST, TENURE, Tenure, eventually
from tests.cli.terminals import on_terminal


def test_a_lock_its_holder_and_its_waiters(tenure: Tenure) -> None:
    holder = tenure.hold("--data", "the first")
    second = tenure.start("run", "--lock", "nightly", "--data", "second", "--", "true")
    eventually(lambda: tenure.waiting() == 1)
    third = tenure.start("run", "--lock", "nightly", "--timeout", "600", "--", "true")
    eventually(lambda: tenure.waiting() == 2)

    head, row = tenure("ls").stdout.splitlines()
    assert head.split() == "NODE NAME KIND HELD WAITING SINCE OWNER HOST DATA".split()
    assert re.fullmatch(
        r"/default +nightly +mutex +held +2 +[\d.]+ s "
        rf"+pid {holder.process.pid} tenure run sh +{HOST} +the first",
        row,
    )

    seen = tenure("describe", "nightly").stdout
    assert seen.startswith("nightly  mutex on /default\nheld, 2 waiting\n\nOwners\n")
    owners, _, waiters = seen.partition("Waiters, in order\n")
    assert re.search(
        rf"\d+ +all +[\d.]+ s +{holder.process.pid} +{HOST} +tenure run sh +the first +\d+", owners
    )
    processes = [int(line.split()[4]) for line in waiters.splitlines()[1:]]
    assert processes == [second.process.pid, third.process.pid]

    described = tenure.json("describe", "nightly")
    assert (described["node"], described["kind"], described["limit"]) == (
        "/default",
        "mutex",
        None,
    )
    (owner,) = described["owners"]
    assert (owner["data"], owner["count"]) == ("the first", None)
    first, last = described["waiters"]
    assert owner["order_id"] < first["order_id"] < last["order_id"]
    assert [first["pid"], last["pid"]] == [second.process.pid, third.process.pid]
    assert {(each["host"], each["program"]) for each in (owner, first, last)} == {(HOST, "tenure")}
    assert last["timeout"] is None or last["timeout"] <= 600


def test_every_node_is_listed_or_one(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/billing")
    tenure.inside("sem", "create", "gpu", "--limit", "4", "--node", "/billing", "--data", "config")
    tenure.inside("sem", "create", "primary", "--limit", "1")
    tenure.inside("config", "set", "feature", "on")
    assert [line.split()[:4] for line in tenure("ls").stdout.splitlines()[1:]] == [
        ["/billing", "gpu", "semaphore", "0"],
        ["/default", "feature", "config", "0"],
        ["/default", "primary", "election?", "0"],
    ]
    (node,) = tenure.json("ls", "/billing")["nodes"]
    (gpu,) = node["semaphores"]
    assert (node["path"], gpu["name"], gpu["limit"], gpu["held"], gpu["data"]) == (
        "/billing",
        "gpu",
        4,
        0,
        "config",
    )


def test_where_there_is_nothing_it_says_what_to_try(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/billing")
    assert tenure("ls").stdout == (
        f"nothing is held, awaited or stored (/billing, /default) in {tenure.url}\n"
        "try: tenure run --lock demo -- sleep 60 &  then: tenure ls\n"
    )
    assert tenure.json("ls", "/billing") == {
        "nodes": [{"path": "/billing", "sessions": 0, "semaphores": []}]
    }


def test_before_the_first_use_there_is_nothing_and_nothing_is_made(tenure: Tenure) -> None:
    done = tenure("ls")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nothing is held")
    assert tenure.json("ls") == {"nodes": []}
    assert list(tenure.folder.iterdir()) == []


def test_a_relative_url_is_shown_with_its_absolute_path(tenure: Tenure) -> None:
    here = {**tenure.environment, "TENURE_URL": "sqlite:///jobs.db"}
    absolute = f"sqlite:///{tenure.folder}/jobs.db"
    with on_terminal([*TENURE, "sem", "create", "gpu", "--limit", "2"], here, tenure.folder) as it:
        it.rest()
    with on_terminal([*TENURE, "ls"], here, tenure.folder, columns=200) as screen:
        assert f"store: {absolute}" in screen.rest()
    (tenure.folder / "elsewhere").mkdir()
    with on_terminal([*TENURE, "ls"], here, tenure.folder / "elsewhere", columns=300) as screen:
        assert f"in sqlite:///{tenure.folder}/elsewhere/jobs.db" in screen.rest()


def test_a_mistyped_file_is_not_made(tenure: Tenure) -> None:
    done = tenure("ls", "--url", "sqlite:///stoer.db")
    assert (done.returncode, done.stdout) == (74, "")
    assert "stoer.db" in done.stderr
    assert list(tenure.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "nigthly"], "there is no 'nigthly' on /default (did you mean 'nightly'?)"),
        (["describe", "gpu"], "there is no 'gpu' on /default, but on /billing (--node)"),
        (["describe", "gpu", "--node", "/biling"], "no node /biling (did you mean /billing?)"),
        (["ls", "/biling"], "there is no node /biling (did you mean /billing?)"),
        (["describe", "zzz"], "there is no 'zzz' on /default; a mutex exists only while"),
    ],
)
def test_a_mistyped_name_gets_the_near_ones(
    tenure: Tenure, arguments: list[str], message: str
) -> None:
    tenure.inside("node", "create", "/billing")
    tenure.inside("sem", "create", "gpu", "--limit", "4", "--node", "/billing")
    tenure.inside("sem", "create", "nightly", "--limit", "1")
    done = tenure.inside(*arguments)
    assert (done.returncode, done.stdout) == (73, "")
    assert done.stderr.startswith("tenure: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


async def test_nothing_that_others_wrote_reaches_the_terminal_as_it_is(tenure: Tenure) -> None:
    evil = b"\x1b[2Jgone\x07\r\n\xff\xe2\x80\xae" + "żółw".encode()
    shown = r"\x1b[2Jgone\x07\r\n\xff\u202eżółw"
    async with (
        tenure_package.connect(tenure.url) as client,
        client.session(description="de\x1bsc") as session,
        session.mutex("na\x1bme").lock(data=evil),
    ):
        for seen in (tenure("ls").stdout, tenure("describe", "na\x1bme").stdout):
            assert r"na\x1bme" in seen
            assert r"de\x1bsc" in seen
            assert shown in seen
        with on_terminal([*TENURE, "ls"], tenure.environment, tenure.folder) as screen:
            assert "\x1b[2J" not in screen.rest()
        (owner,) = tenure.json("describe", "na\x1bme")["owners"]
        assert owner["data"] is None
        assert owner["data_base64"] == "G1sySmdvbmUHDQr/4oCuxbzDs8WCdw=="


async def test_long_data_is_shortened_for_a_person_and_whole_for_a_script(tenure: Tenure) -> None:
    async with tenure_package.connect(tenure.url) as client:
        await client.semaphore("big").create(limit=1, data=b"x" * 100_000)
        assert "… (100,000 bytes)" in tenure("describe", "big").stdout
        assert len(tenure("ls").stdout) < 1000
        assert tenure.json("describe", "big")["data"] == "x" * 100_000


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_on_a_terminal_a_table_fits_its_width(tenure: Tenure, columns: int) -> None:
    tenure.hold("--data", "some long description of what this holder is at " * 3)
    for command in (["ls"], ["describe", "nightly"], ["node", "describe"]):
        with on_terminal(
            [*TENURE, *command], tenure.environment, tenure.folder, columns=columns
        ) as screen:
            seen = re.sub(r"\x1b\[[\d;]*m", "", screen.rest())
        assert screen.process.wait() == 0
        assert max(map(len, seen.splitlines())) <= columns
        assert "nightly" in seen or command == ["node", "describe"]


def test_whoever_has_read_enough_is_no_error(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "4")
    process = subprocess.Popen(
        [*TENURE, "ls"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=tenure.environment,
        cwd=tenure.folder,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE
