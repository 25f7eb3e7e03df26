"""The command that runs the benchmarks: each part by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from benchmarks import blocking
from benchmarks.__main__ import PARTS, chosen, main
from benchmarks.measure import Measured


def _row(what: str) -> Measured:
    return Measured(what, 5.0, "pairs/s", "a peer", 4.0, 1.25, at_least=1.0)


def _fails() -> Iterator[Measured]:
    yield _row("before the failure")
    raise AssertionError("the server grew")


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, which only the benchmarks need."""
    monkeypatch.setattr("benchmarks.__main__._picture", lambda results, path: None)


_SOME = {"one": lambda: [_row("one row")], "bad": _fails, "other": lambda: [_row("other row")]}


def test_a_part_that_fails_fails_only_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path)], _SOME) == 1
    printed = capsys.readouterr().out
    for row in ("one row", "before the failure", "other row"):
        assert row in printed
        assert row in (tmp_path / "results.md").read_text()
    assert "FAILED: bad: AssertionError('the server grew')" in printed.splitlines()[-1]
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 3


def test_a_part_prints_its_rows_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    def later() -> list[Measured]:
        printed.append(capsys.readouterr().out)
        return [_row("later")]

    assert main(["--folder", str(tmp_path)], {"one": _SOME["one"], "later": later}) == 0
    assert "one row" in printed[0]


def test_only_the_named_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "other"], _SOME) == 0
    assert "one row" not in capsys.readouterr().out


def test_a_name_stands_for_the_parts_that_begin_with_it() -> None:
    assert list(chosen(["redis", "memory"], PARTS)) == [
        *("memory", "memory-core"),
        *("redis", "redis-threads"),
    ]
    assert list(chosen(["sqlite-full"], PARTS)) == ["sqlite-full"]
    assert list(chosen([], PARTS)) == list(PARTS)


def test_an_unknown_name_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["redsi"], PARTS)
    printed = capsys.readouterr().err
    assert "no part 'redsi'" in printed
    assert "sqlite-processes, server" in printed


def test_threads_are_measured_with_a_lock_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "SECONDS", 0.01)
    locks = [threading.Lock() for _ in range(3)]
    users: list[set[int]] = [set() for _ in locks]

    def prepare(_: ExitStack, number: int) -> blocking.Block:
        def block() -> AbstractContextManager[object]:
            users[number].add(threading.get_ident())
            return locks[number]

        return block

    pairs = blocking._pairs(prepare, len(locks))
    assert [len(each) for each in users] == [1, 1, 1]
    assert pairs.rate > 0
    assert pairs.median > 0


def test_the_error_of_a_measured_thread_is_raised() -> None:
    def prepare(_: ExitStack, number: int) -> blocking.Block:
        if number == 1:
            raise ConnectionError("the server is gone")
        return threading.Lock

    with pytest.raises(ConnectionError, match="the server is gone"):
        blocking._pairs(prepare, 3)
