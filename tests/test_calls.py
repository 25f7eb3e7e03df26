"""The script that counts the Python calls of a lock (``benchmarks/calls.py``)."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.calls import Calls, calls_of_lock, main


def test_a_switch_is_a_call_in_another_file_than_the_one_before() -> None:
    calls = Calls([("a.py", "one"), ("a.py", "two"), ("b.py", "three"), ("a.py", "one")])

    assert (len(calls.trail), calls.files, calls.switches) == (4, 2, 2)


def test_the_calls_of_a_lock_begin_with_the_call_of_lock_and_end_before_its_release() -> None:
    calls = asyncio.run(calls_of_lock("memory://calls"))

    assert calls.trail[0] == ("_client/mutex.py", "Mutex.lock")
    assert not any("__aexit__" in function for _, function in calls.trail)


def test_it_prints_a_row_for_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", "sqlite", "--list"])

    title, *rows = capsys.readouterr().out.splitlines()
    table = [row.split() for row in rows if not row.startswith(" ")]
    assert title.split() == ["engine", "calls", "files", "switches"]
    assert [engine for engine, *_ in table] == ["memory", "sqlite"]
    for _, calls, files, switches in table:
        assert int(calls) > int(switches) >= int(files) - 1 > 0


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["mysql"])

    assert "unknown engine: mysql" in capsys.readouterr().err
