"""Python calls of one uncontended ``async with mutex.lock()``, by engine.

``python -m benchmarks.calls [ENGINE ...]`` prints the table, and ``--list`` each call beneath it.
An engine whose server is not installed has a row without figures.

Definitions:

* The *lock* begins with the call of ``mutex.lock()``, and ends where the program waits for the
  first time. The *grant* is the rest, until the body of the block begins. An engine that grants
  within the call has no grant. The session is attached. Its first locks are not measured, because
  they import modules.
* A *call* is an entry into a frame of the package ``tenure`` on the thread of the event loop, as
  `sys.setprofile` reports it. A coroutine that resumes is entered again. A comprehension counts as
  part of its function. Other packages and the standard library do not count.
* *Files* are the source files of these calls. A *switch* is a call in another file than the one
  before it. A *move* is a call or a return that leads into another package (folder).
* Renewals and timers share the thread. The figures are those of the lock with the fewest calls.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

import tenure
from tests.engines.stores import stores

ROUNDS = 20
WARM_UP = 5

_PACKAGE = f"{Path(tenure.__file__).parent}/"
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

ENGINES = ("memory", "sqlite", "redis", "etcd", "tenure")
"""Those whose administrators and programs have the same URL."""


class Trail(list[tuple[str, str]]):
    """File and qualified name of each function, in the order of the calls.

    Attributes:
        moves: number of calls and returns that lead from one package to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moves = 0
        self._package = ""

    @property
    def files(self) -> int:
        """Number of files that the calls are in."""
        return len({file for file, _ in self})

    @property
    def switches(self) -> int:
        """Number of calls from one file to another."""
        return sum(file != before for (before, _), (file, _) in pairwise(self))

    def call(self, file: str, function: str) -> None:
        """Note a call."""
        self.append((file, function))
        self.enter(file)

    def enter(self, file: str) -> None:
        """Note that a function of this file runs, after a call or a return."""
        package = str(Path(file).parent)
        self.moves += self._package not in ("", package)
        self._package = package


class Calls:
    """The calls of one lock.

    Attributes:
        lock: the calls until the program waits.
        grant: the calls from then until the program goes on.
    """

    def __init__(self) -> None:
        self.lock, self.grant = Trail(), Trail()
        self._trail = self.lock

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note an event of `sys.setprofile`."""
        if event == "return" and frame.f_code is calls_of_lock.__code__:
            self._trail = self.grant
        elif event == "call" and _is_ours(frame) and frame.f_code.co_name not in _COMPREHENSIONS:
            self._trail.call(_file_of(frame), frame.f_code.co_qualname)
        elif event == "return" and _is_ours(frame):
            caller = frame.f_back
            while caller is not None and not _is_ours(caller):
                caller = caller.f_back
            if caller is not None:
                self._trail.enter(_file_of(caller))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _file_of(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(_PACKAGE)


async def calls_of_lock(url: str) -> Calls:
    """Lock a free mutex on a store some times, and return the calls of the shortest lock."""
    found = []
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("calls")
        for number in range(WARM_UP + ROUNDS):
            calls = Calls()
            sys.setprofile(calls.note)
            try:
                async with mutex.lock():
                    sys.setprofile(None)
            finally:
                sys.setprofile(None)
            if number >= WARM_UP:
                found.append(calls)
    return min(found, key=lambda calls: len(calls.lock) + len(calls.grant))


def main(arguments: list[str] | None = None) -> None:
    """Print the calls of each engine."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.calls", description="Count the Python calls of one mutex.lock()."
    )
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--list", action="store_true", help="print each call")
    options = parser.parse_args(arguments)
    if unknown := set(options.engines) - {*ENGINES}:
        parser.error(f"unknown engine: {', '.join(sorted(unknown))}")
    titles = f"{'calls':>8}{'files':>7}{'switches':>10}{'moves':>7}"
    print(f"{'':8}{'lock':>8}{'grant':>{len(titles)}}")
    print(f"{'engine':8}{titles}{titles}")
    for engine in options.engines or ENGINES:
        try:
            with stores(engine).empty() as url:
                calls = asyncio.run(calls_of_lock(url))
        except pytest.skip.Exception as missing:
            print(f"{engine:8}  not measured: {missing}")
            continue
        print(f"{engine:8}{_figures(calls.lock)}{_figures(calls.grant)}")
        if options.list:
            for part, trail in ("lock", calls.lock), ("grant", calls.grant):
                for file, function in trail:
                    print(f"    {part:5}  {file}  {function}")


def _figures(trail: Trail) -> str:
    return f"{len(trail):8}{trail.files:7}{trail.switches:10}{trail.moves:7}"


if __name__ == "__main__":
    main()
