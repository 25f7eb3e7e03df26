"""`tenure config`: a value is published, read and followed, byte for byte."""

from __future__ import annotations

import json
import subprocess

import pytest

import tenure as tenure_package
from tenure.recipes import SharedConfig
from tests.cli.programs import TENURE, Tenure


def raw(tenure: Tenure, *arguments: str, says: bytes = b"") -> bytes:
    done = subprocess.run(
        [*TENURE, "config", *arguments],
        input=says,
        env=tenure.environment,
        cwd=tenure.folder,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def test_bytes_come_out_as_they_went_in(tenure: Tenure) -> None:
    raw(tenure, "set", "motd", "hello")
    assert raw(tenure, "get", "motd") == b"hello"
    raw(tenure, "set", "motd", "-", says=b"\x00\xff\x1b[2J\r\n")
    assert raw(tenure, "get", "motd") == b"\x00\xff\x1b[2J\r\n"
    (tenure.folder / "value").write_bytes(b"from a file\n")
    raw(tenure, "set", "motd", "--file", "value")
    assert raw(tenure, "get", "motd") == b"from a file\n"


async def test_json_is_what_programs_read_and_write(tenure: Tenure) -> None:
    done = tenure("config", "set", "app", "--json", ' {"b": 1, "a": [2.5, "é"]} ')
    assert (done.returncode, done.stdout) == (0, "")
    async with tenure_package.connect(tenure.url) as client:
        shared = SharedConfig[object](client, "app")
        assert await shared.get() == {"b": 1, "a": [2.5, "é"]}
        await shared.set({"level": 3})
    assert tenure("config", "get", "app").stdout == '{"level":3}'


def test_every_newer_value_is_shown(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    plain = tenure.start("config", "watch", "app", "--count", "3")
    told = tenure.start("config", "watch", "app", "--json")
    assert plain.line().split(maxsplit=1)[1] == "(nothing published)"
    first = json.loads(told.line())
    assert (first["exists"], first["data"], first["data_base64"]) == (False, None, None)
    tenure.inside("config", "set", "app", "one\x1b[2J")
    assert plain.line().split(maxsplit=1)[1] == r"one\x1b[2J"
    assert json.loads(told.line())["data"] == "one\x1b[2J"
    holder = tenure.start("run", "--elect", "app", "--", "true")  # its owners are no value
    assert holder.end() == (0, "")
    tenure.inside("config", "set", "app", "two")
    assert plain.line().split(maxsplit=1)[1] == "two"
    assert json.loads(told.line())["data"] == "two"
    assert plain.end() == (0, "")
    assert tenure("config", "watch", "app", "--once").stdout.endswith("  two\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["get", "ap"], 73, "nothing has been published as 'ap' on /default (did you mean 'app'?)"),
        (["get", "app", "--node", "/defualt"], 73, "did you mean /default?"),
        (["get", "gpu"], 78, "is a semaphore of limit 4"),
        (["watch", "gpu"], 78, "is a semaphore of limit 4"),
        (["set", "gpu", "x"], 78, "is a semaphore of limit 4"),
        (["set", "app"], 78, "give one of VALUE, '-' and --file FILE"),
        (["set", "app", "x", "--file", "-"], 78, "give one of"),
        (["set", "app", "--file", "missing"], 78, "missing"),
        (["set", "app", "--json", "{"], 78, "the value is not JSON"),
        (["set", "app", "--json", "NaN"], 78, "the value is not JSON"),
        (["set", "app", ""], 78, "no bytes"),
        (["put"], 78, "there are: get, set, watch"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "4")
    tenure.inside("config", "set", "app", "x")
    done = tenure.inside("config", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
