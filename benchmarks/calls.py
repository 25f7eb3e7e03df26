"""Python calls of one uncontended ``async with mutex.lock()``, by engine.

``python -m benchmarks.calls [ENGINE ...]`` prints the table, and ``--list`` each call beneath it.
An engine whose server is not installed has a row without figures.

Definitions:

* The interval begins with the call of ``mutex.lock()`` and ends where the body of the block begins.
  The session is attached. Its first locks are not measured, because they import modules.
* A *call* is an entry into a frame of the package ``tenure`` on the thread of the event loop, as
  `sys.setprofile` reports it. A coroutine that resumes is entered again. A comprehension counts as
  part of its function. Other packages and the standard library do not count.
* *Files* are the source files of these calls. A *switch* is a call in another file than the one
  before it.
* Renewals and timers share the thread. The figures are those of the lock with the fewest calls.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

import tenure
from tests.engines.stores import stores

ROUNDS = 20
WARM_UP = 5

_PACKAGE = f"{Path(tenure.__file__).parent}/"
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

ENGINES = ("memory", "sqlite", "redis", "etcd", "tenure")
"""Those whose administrators and programs have the same URL."""


class Calls(NamedTuple):
    """The calls of one lock.

    Attributes:
        trail: file and qualified name of each function, in the order of the calls.
    """

    trail: list[tuple[str, str]]

    @property
    def files(self) -> int:
        """Number of files that the calls are in."""
        return len({file for file, _ in self.trail})

    @property
    def switches(self) -> int:
        """Number of calls from one file to another."""
        files = [file for file, _ in self.trail]
        return sum(file != before for before, file in pairwise(files))

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note an event of `sys.setprofile`."""
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(_PACKAGE)
            and code.co_name not in _COMPREHENSIONS
        ):
            self.trail.append((code.co_filename.removeprefix(_PACKAGE), code.co_qualname))


async def calls_of_lock(url: str) -> Calls:
    """Lock a free mutex on a store some times, and return the calls of the shortest lock."""
    found = []
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("calls")
        for number in range(WARM_UP + ROUNDS):
            calls = Calls([])
            sys.setprofile(calls.note)
            try:
                async with mutex.lock():
                    sys.setprofile(None)
            finally:
                sys.setprofile(None)
            if number >= WARM_UP:
                found.append(calls)
    return min(found, key=lambda calls: len(calls.trail))


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
    print(f"{'engine':8}{'calls':>8}{'files':>8}{'switches':>10}")
    for engine in options.engines or ENGINES:
        try:
            with stores(engine).empty() as url:
                calls = asyncio.run(calls_of_lock(url))
        except pytest.skip.Exception as missing:
            print(f"{engine:8}  not measured: {missing}")
            continue
        print(f"{engine:8}{len(calls.trail):8}{calls.files:8}{calls.switches:10}")
        if options.list:
            for file, function in calls.trail:
                print(f"    {file}  {function}")


if __name__ == "__main__":
    main()
