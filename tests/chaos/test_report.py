"""What is said of a run, and with which exit status."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.__main__ import main
from tenure.testing.history import Gone, Granted, Leaves, Record, Requested, Truth, dump


def run_of(
    folder: Path, records: Sequence[Record], *, settled: bool = True, failures: Sequence[str] = ()
) -> Path:
    """The folder of a run of one second."""
    dump(records, folder / "p0.1.history")
    facts = {
        "engine": "sqlite",
        "seed": 7,
        "begun": 0.0,
        "ended": 1.0,
        "settled": settled,
        "faults": [{"name": "kill", "begun": 0.2, "ended": 0.3, "what": "p0.1", "done": True}],
        "failures": list(failures),
        "not_done": {"reboot": "nobody may"},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def held(number: int, at: float, until: float) -> list[Record]:
    label = f"p0.1-{number}"
    return [
        Requested(at, "p0.1", label, "/n", "job", 1, 1, 2.0),
        Granted(at, label, number, at + 2.0),
        Leaves(until, label),
        Gone(until, label, "released", at + 2.0),
    ]


def enough() -> list[Record]:
    """One after the other, at sixty a second."""
    return [
        record
        for number in range(60)
        for record in held(number + 1, number / 60, number / 60 + 0.01)
    ]


def test_a_run_with_enough_to_do_and_nothing_found_has_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(run_of(tmp_path, enough()))]) == 0

    said = capsys.readouterr().out
    assert said.endswith("passed\n")
    for line in ("60, 60 a second", "1: kill 1", "reboot: nobody may", "violations"):
        assert line in said


def test_for_scripts_it_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", str(run_of(tmp_path, enough()))]) == 0

    said = json.loads(capsys.readouterr().out)
    assert said["passed"] is True
    assert said["acquisitions_per_second"] == 60.0
    assert said["faults"] == {"kill": 1}
    assert said["violations"] == []


def test_a_run_with_too_little_to_do_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(run_of(tmp_path, enough()[:100]))]) == 3
    assert "DOES NOT COUNT: 25 acquisitions a second" in capsys.readouterr().out


def test_a_broken_promise_is_told_at_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [*held(100, 0.1, 0.5), *held(101, 0.2, 0.6)]

    assert main(["check", str(run_of(tmp_path, [*enough(), *both]))]) == 1
    said = capsys.readouterr().out
    assert "limit: " in said
    assert "FAILED: promises were broken" in said


def test_what_is_done_after_the_truth_is_told_is_not_judged_by_it(tmp_path: Path) -> None:
    holds = held(200, 0.99, 1.0)[:2]
    after = [Truth(0.995, "/n", "job", b""), *held(300, 0.996, 0.998)]

    assert main(["check", str(run_of(tmp_path, [*enough(), *after]))]) == 0
    (lost := tmp_path / "lost").mkdir()
    assert main(["check", str(run_of(lost, [*enough(), *holds, *after]))]) == 1


def test_a_store_that_never_settles_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(run_of(tmp_path, enough(), settled=False))]) == 1
    assert "the store did not settle" in capsys.readouterr().out


def test_a_process_that_fails_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path, enough(), failures=["process p1.1 ended by itself"])
    assert main(["check", str(folder)]) == 1
    assert "process p1.1 ended by itself" in capsys.readouterr().out


def test_a_folder_of_no_run_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_a_fault_that_there_is_not_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--faults", "kill,moon", "--folder", str(tmp_path)]) == 2
    assert "no fault named moon" in capsys.readouterr().err
