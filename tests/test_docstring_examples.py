"""The examples in docstrings are run.

An example is the indented block below a line ``Example::``. It may use these names:

- `tenure`, the package;
- `client`, connected to a store of its own, and `session`, on the node ``/default``: those of
  `tenure.blocking` in its modules and wherever a module is called ``blocking``;
- `work`, which stands for the program's own work and takes any arguments.

It runs in an empty folder, with a Redis of its own in the place of ``redis://localhost``, and an
empty database ``postgresql:///jobs``. Where it awaits something, it runs in an event loop.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any

import pytest

import tenure
from tenure import blocking
from tests.fencing.servers import a_postgres, a_redis, jobs_database
from tools import sync

SOURCE = Path(tenure.__file__).parent
EXAMPLE = re.compile(r"(?m)^(?P<margin> *)Example::\n(?P<code>(?:\n|(?P=margin) {4}.*(?:\n|\Z))+)")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
TIME_LIMIT = 30  # seconds for one example
REDIS = "redis://localhost"
POSTGRESQL = "postgresql:///jobs"


def examples_in(text: str) -> Iterator[tuple[str, str]]:
    """The examples of a module, with the name of what each one documents."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED):
            for found in EXAMPLE.finditer(ast.get_docstring(node) or ""):
                yield getattr(node, "name", "module"), dedent(found["code"]).strip()


EXAMPLES = [
    pytest.param(path.relative_to(SOURCE), code, id=f"{path.relative_to(SOURCE)}:{name}")
    for path in sorted(SOURCE.rglob("*.py"))
    for name, code in examples_in(path.read_text(encoding="utf-8"))
]


async def work(*_: object, **__: object) -> None:
    pass


def work_of_a_thread(*_: object, **__: object) -> None:
    pass


async def run_in_a_loop(function: FunctionType, names: dict[str, Any]) -> None:
    async with (
        asyncio.timeout(TIME_LIMIT),
        tenure.connect("memory://examples-async") as client,
        client.session() as session,
    ):
        names.update(client=client, session=session, work=work)
        await function()


def run_in_a_thread(function: FunctionType, names: dict[str, Any]) -> None:
    with (
        blocking.connect("memory://examples-of-threads") as client,
        client.session() as session,
    ):
        names.update(client=client, session=session, work=work_of_a_thread)
        function()


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with a_redis() as url:
        yield url


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with a_postgres() as url:
        yield url


@pytest.mark.parametrize(("path", "text"), EXAMPLES)
def test_an_example_runs(
    path: Path,
    text: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if REDIS in text:
        text = text.replace(REDIS, request.getfixturevalue("redis_url"))
    if POSTGRESQL in text:
        for name, value in jobs_database(request.getfixturevalue("postgres_url")).items():
            monkeypatch.setenv(name, value)
    code = compile(text, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"__name__": "example", "tenure": tenure}
    function = FunctionType(code, names)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(run_in_a_loop(function, names))
    else:
        run_in_a_thread(function, names)


def test_every_example_is_found() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    assert len(EXAMPLES) == len(re.findall(r"(?m)^ *Examples?:", text)) > 40


@pytest.mark.parametrize("name", ["Mutex", "Semaphore", "Election", "Lease", "Session", "Ticket"])
def test_the_example_of_a_wrapper_awaits_nothing(name: str) -> None:
    package = {"tenure": tenure, "tenure.blocking": blocking}
    [here] = [code for _, code in examples_in(class_of(package["tenure"], name))]
    [there] = [code for _, code in examples_in(class_of(package["tenure.blocking"], name))]
    assert "async with" in here
    assert there == sync.documentation(here)
    assert not re.search(r"\b(async|await)\b", there)


def class_of(package: Any, name: str) -> str:
    """A class with nothing but its docstring, as source."""
    return f"class {name}:\n    {getattr(package, name).__doc__!r}"
