"""`tenure demo`, as a new user runs it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenure import connect
from tenure.cli.demo import command
from tenure.cli.demo.scenes import SCENES, DemoStage, Finding, History, parse
from tests.cli.programs import TENURE, Tenure, alive, eventually
from tests.cli.terminals import on_terminal


def recorded(file: Path) -> History:
    """The record that a demo has left, read back."""
    history = History()
    history.events += map(parse, file.read_text().splitlines())
    return history


def test_it_shows_what_it_proves_and_leaves_nothing_behind(tenure: Tenure) -> None:
    (tenure.folder / "tmp").mkdir()
    started = time.monotonic()
    done = tenure("demo", "--history", "record", TMPDIR=str(tenure.folder / "tmp"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert time.monotonic() - started < 20
    assert list((tenure.folder / "tmp").iterdir()) == []
    for scene in SCENES:
        assert scene.title in done.stdout
    assert re.search(r"took over from w\d after its kill -9: [\d.]+ ms\n", done.stdout)
    assert re.search(r"all \d+ checks of the record hold\n$", done.stdout)
    assert "\x1b" not in done.stdout

    history = recorded(tenure.folder / "record")
    assert len(history.holds("nightly")) == 12
    assert len(history.holds("gpu")) == 24
    assert len(history.holds("primary")) == 4
    assert all(
        finding.holds
        for scene in SCENES
        for finding in scene.check(history)
        if " looks " not in finding.text  # they are no events
    )
    # A record in which one process had begun a moment earlier is refused.
    lines = [json.loads(line) for line in (tenure.folder / "record").read_text().splitlines()]
    second = history.holds("nightly")[1]
    for line in lines:
        if (line["what"], line["token"]) == ("granted", second.token):
            line["at"] = history.holds("nightly")[0].ended - 1e-6
    (tenure.folder / "record").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not recorded(tenure.folder / "record").check_limit("nightly", 1).holds


def test_a_check_that_fails_shows_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play(history: History) -> list[Finding]:
        findings = [Finding(True, "good"), Finding(False, "planted")]
        command._sum_up(findings, history, 1.0)
        return findings

    monkeypatch.setattr(command, "_play", play)
    assert command.demo.main([], standalone_mode=False) == 70
    assert "1 of 2 checks of the record FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 120])
def test_on_a_terminal_it_fits_its_width(tenure: Tenure, columns: int) -> None:
    with on_terminal(
        [*TENURE, "demo"], tenure.environment, tenure.folder, columns=columns
    ) as screen:
        seen = screen.rest()
        assert screen.process.wait() == 0, seen
    assert "\x1b[" in seen
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen).splitlines()
    assert max(map(len, lines)) <= columns


@contextmanager
def playing(tenure: Tenure, scene: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A demo that has come to a scene, and the ids of its processes."""
    (tenure.folder / "tmp").mkdir()
    with subprocess.Popen(
        [*TENURE, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**tenure.environment, "TMPDIR": str(tenure.folder / "tmp")},
        cwd=tenure.folder,
    ) as process:
        assert process.stdout is not None
        while SCENES[scene].title not in process.stdout.readline():
            pass
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield process, [int(pid) for pid in children.split()]


@pytest.mark.parametrize(
    ("scene", "numbers"),
    [
        (0, [signal.SIGKILL]),
        (0, [signal.SIGINT]),
        (1, [signal.SIGTERM]),
        (1, [signal.SIGINT, signal.SIGINT]),
        (2, [signal.SIGINT]),
        (3, [signal.SIGTERM]),
    ],
)
def test_ended_early_it_leaves_no_process_behind(
    tenure: Tenure, scene: int, numbers: list[signal.Signals]
) -> None:
    with playing(tenure, scene) as (process, workers):
        assert len(workers) >= 7
        for number in numbers:
            process.send_signal(number)
        _, said = process.communicate()
        assert said == ""
        eventually(lambda: not any(map(alive, workers)))
    if numbers != [signal.SIGKILL]:
        assert process.returncode == 128 + numbers[0]
        assert list((tenure.folder / "tmp").iterdir()) == []


def test_when_nobody_reads_it_any_more_it_ends_and_leaves_nothing_behind(tenure: Tenure) -> None:
    with playing(tenure, 1) as (process, workers):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        eventually(lambda: not any(map(alive, workers)))
    assert process.returncode == 128 + signal.SIGPIPE
    assert list((tenure.folder / "tmp").iterdir()) == []


async def test_a_look_that_is_ended_leaves_no_task_behind() -> None:
    async with connect("memory://") as client, client.session() as session:
        before, working = asyncio.all_tasks(), asyncio.Event()

        async def work() -> None:
            working.set()
            await asyncio.Event().wait()

        stage = DemoStage(client, session, [], History())
        looking = asyncio.create_task(stage.while_looking("nightly", [work()]))
        await working.wait()
        looking.cancel()
        await asyncio.wait([looking])
        assert looking.cancelled()
        assert asyncio.all_tasks() == before
