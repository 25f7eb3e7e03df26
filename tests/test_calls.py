"""The script that counts the Python calls of a lock (``benchmarks/calls.py``)."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.calls import Trail, calls_of_lock, main


def test_a_switch_is_a_call_in_another_file_and_a_move_one_in_another_package() -> None:
    trail = Trail()
    for file in ("a/x.py", "a/x.py", "a/y.py", "b/x.py"):
        trail.call(file, "function")
    trail.enter("a/y.py")  # a return

    assert (len(trail), trail.files, trail.switches, trail.moves) == (4, 3, 2, 2)


def test_the_calls_of_a_lock_begin_with_the_call_of_lock_and_end_before_its_release() -> None:
    calls = asyncio.run(calls_of_lock("memory://calls"))

    assert calls.lock[0] == ("_client/mutex.py", "Mutex.lock")
    assert not any("__aexit__" in function for _, function in calls.lock)
    assert calls.grant == []  # within the call


def test_it_prints_a_row_for_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", "sqlite", "--list"])

    parts, title, *rows = capsys.readouterr().out.splitlines()
    table = [row.split() for row in rows if not row.startswith(" ")]
    assert parts.split() == ["lock", "grant"]
    assert title.split() == ["engine", *2 * ["calls", "files", "switches", "moves"]]
    assert [engine for engine, *_ in table] == ["memory", "sqlite"]
    for _, *figures in table:
        calls, files, switches, moves, *grant = map(int, figures)
        assert calls > switches >= moves > 0
        assert switches >= files - 1 > 0
        assert grant == [0, 0, 0, 0]


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["mysql"])

    assert "unknown engine: mysql" in capsys.readouterr().err
