"""Imports run one way:

    errors, model ← core ← wire ← engines ← reaper ← primitives
        ← recipes, blocking, interop, telemetry ← console ← server ← cli

and `fencing`, which stands where a resource is and not where leases are, imports errors alone.

Every import statement counts, wherever it stands: inside a function, under TYPE_CHECKING, or
as `import_module("...")`. The tables below are the rules; `reasons_against` applies them.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.engines import BUILT_IN

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tenure"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# --- the rules -----------------------------------------------------------------------------

# From the bottom up, by the part of `tenure` that a module belongs to. A module may import its
# own layer and those below it.
PRIMITIVES = "the modules directly in tenure that no other row names, tenure itself among them"
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "model"}),
    frozenset({"core"}),
    frozenset({"wire"}),
    frozenset({"fencing"}),  # of these three it may import what FOR_FENCES says
    # What the engines share, and the core must not see:
    frozenset({"background", "busy_poll", "clock", "durations", "fork", "greenlets", "identity"}),
    frozenset({"engines"}),
    frozenset({"reaper"}),
    frozenset({"_client", PRIMITIVES}),  # the public names are what the client exports
    frozenset({"recipes", "blocking", "interop", "telemetry"}),
    frozenset({"console"}),
    frozenset({"server"}),
    frozenset({"cli", "__main__"}),
)

# No clock, no I/O, no asyncio, no chance: not in the core, not below it, not in the protocol.
WITHOUT_A_WORLD = frozenset({"errors", "model", "core", "wire"})
THE_WORLD = frozenset(
    "asyncio concurrent logging multiprocessing os pathlib random secrets select selectors "
    "signal socket sqlite3 ssl subprocess tempfile threading time uuid".split()
)

# All that may be imported of the engines from above them, but for these parts.
DOORS = frozenset({"tenure.engines", "tenure.engines.contract"})
PAST_THE_DOORS = frozenset({"engines", "cli", "testing"})

# What a recipe is not made of: it shows what the public primitives are good for.
NOT_FOR_RECIPES = frozenset({"core", "engines"})

# What a fence is made of: it may stand in a program that has no lease, and no store of them.
FOR_FENCES = frozenset({"errors", "fencing"})

# `tenure.testing` stands beside the layers: it may import all but the programs, and of these
# only the commands that show or simulate may import it.
PROGRAMS = frozenset({"server", "cli", "__main__"})
SHOWING = frozenset({"demo", "simulate"})

# Who may import what from outside the standard library, by the longest prefix. Else: nobody.
THIRD_PARTY: dict[str, frozenset[str]] = {
    "tenure.cli": frozenset({"click", "rich"}),
    "tenure.console": frozenset({"jinja2", "markupsafe", "starlette", "uvicorn"}),
    "tenure.engines.native": frozenset({"msgspec"}),
    "tenure.engines.etcd": frozenset({"hpack"}),
    "tenure.engines.postgresql": frozenset({"psycopg"}),
    "tenure.engines.redis": frozenset({"hiredis"}),
    "tenure.engines.ydb": frozenset({"google", "grpc", "ydb"}),
    "tenure.server": frozenset({"google", "grpclib", "h2", "msgspec", "uvloop", "ydb"}),
    "tenure.server.http": frozenset({"h11", "prometheus_client", "starlette", "uvicorn"}),
    "tenure.greenlets": frozenset({"gevent"}),
    "tenure.interop": frozenset({"redis"}),
    "tenure.telemetry": frozenset({"opentelemetry", "prometheus_client"}),
    "tenure.testing": frozenset({"hypothesis", "pytest"}),
    "tenure.wire": frozenset({"msgspec"}),
    "tenure.wire.ydb": frozenset({"google"}),
}

# An engine that installs by an entry point is a world of its own.
ENGINES = frozenset(BUILT_IN.values())


def part_of(module: str) -> str:
    """The part of tenure that a module belongs to: `tenure.core.queue` to `core`."""
    part = module.split(".")[1] if "." in module else PRIMITIVES
    known = part == "testing" or any(part in layer for layer in LAYERS)
    return part if known else PRIMITIVES


def height(part: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if part in layer)


def engine_of(module: str) -> str | None:
    """The engine that a module is, or is inside of."""
    return next((e for e in ENGINES if module == e or module.startswith(e + ".")), None)


def allowed_outside(module: str) -> frozenset[str]:
    prefixes = [p for p in THIRD_PARTY if module == p or module.startswith(p + ".")]
    return THIRD_PARTY[max(prefixes, key=len)] if prefixes else frozenset()


def reasons_against(importer: str, imported: str) -> Iterator[str]:
    """Why the one module may not import the other; nothing when it may."""
    top = imported.partition(".")[0]
    part = part_of(importer)
    if top != "tenure":
        if part in WITHOUT_A_WORLD and top in THE_WORLD:
            yield "the core and the protocol have no clock, no I/O and no asyncio"
        if top not in sys.stdlib_module_names and top not in allowed_outside(importer):
            yield "it is not in the standard library"
        private = any(name.startswith("_") for name in imported.split("."))
        if part == "engines" and private and top not in sys.stdlib_module_names:
            yield "it is a private module of a library"
        return

    wanted = part_of(imported)
    if part == "testing":
        if wanted in PROGRAMS:
            yield "tenure.testing is a library"
        return
    if wanted == "testing":
        if part != "cli" or not SHOWING & set(importer.split(".")):
            yield "tenure.testing is for tests, and for the commands that show or simulate"
        return
    if height(wanted) > height(part):
        yield "imports run one way, and this one runs up"
    if wanted == "engines" and part not in PAST_THE_DOORS and imported not in DOORS:
        yield "an engine is reached through its contract and the registry"
    if part == "recipes" and wanted in NOT_FOR_RECIPES:
        yield "a recipe is made of primitives"
    if part == "fencing" and wanted not in FOR_FENCES:
        yield "a fence knows no store and no lease"
    if part == "engines" and engine_of(imported) not in {None, engine_of(importer)}:
        yield "an engine knows no other"


# --- reading imports -----------------------------------------------------------------------


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(importer: str, source: str, *, package: bool = False) -> Iterator[tuple[int, str]]:
    """Every module that a source imports, with the line it does so on."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(importer, module, level, package=package)
                for alias in names:
                    # `from tenure import lease` means the module, `... import Lease` does not.
                    inner = f"{base}.{alias.name}"
                    private = alias.name.startswith("_") and not base.startswith("tenure")
                    yield node.lineno, inner if inner in FILES or private else base
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def _absolute(importer: str, module: str | None, level: int, *, package: bool) -> str:
    if level == 0:
        return module or ""
    above = importer.split(".")
    above = above[: len(above) - level + package]
    return ".".join([*above, *([module] if module else [])])


def complaints(importer: str, source: str, *, package: bool = False) -> list[str]:
    return [
        f"line {line}: {importer} imports {imported}: {reason}"
        for line, imported in imports_of(importer, source, package=package)
        for reason in reasons_against(importer, imported)
    ]


# --- the tests -----------------------------------------------------------------------------


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    path = FILES[module]
    source = path.read_text(encoding="utf-8")
    assert complaints(module, source, package=path.name == "__init__.py") == []


def test_the_library_requires_nothing() -> None:
    assert PROJECT["dependencies"] == []


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_engine_that_is_announced_is_there(engine: str) -> None:
    assert engine in FILES


UP = "runs up"
NO_WORLD = "no clock"
OUTSIDE = "standard library"
PRIVATE = "private module"
DOOR = "through its contract"
TESTING = "is for tests"
ALONE = "knows no other"
PRIMITIVE = "made of primitives"
FENCE = "a fence knows"


@pytest.mark.parametrize(
    ("importer", "source", "reason"),
    [
        # the layers
        ("tenure.model", "from tenure.core import rules", UP),
        ("tenure.errors", "import tenure.model", None),
        ("tenure.core.queue", "from tenure.errors import InvalidArgument", None),
        ("tenure.core.queue", "from tenure.core import rules", None),
        ("tenure.core.queue", "from tenure.clock import Clock", UP),
        ("tenure.core.queue", "from tenure.engines.contract import Place", UP),
        ("tenure.core.queue", "import tenure", UP),
        ("tenure.clock", "from tenure._client.session import Session", UP),
        ("tenure.engines.contract", "from tenure.clock import Clock", None),
        ("tenure.wire.messages", "from tenure.model import NodeConfig", None),
        ("tenure.wire.messages", "from tenure.engines.contract import Place", UP),
        ("tenure.core.queue", "from tenure.wire import frames", UP),
        ("tenure.engines.native", "from tenure.wire import frames", None),
        ("tenure.server.native", "from tenure.wire import frames", None),
        ("tenure.engines.memory", "from tenure.core.queue import Queue", None),
        ("tenure.engines.memory", "from tenure._client.lease import Lease", UP),
        ("tenure.engines.memory", "from tenure import Lease", UP),
        ("tenure._client.session", "from tenure._client.lease import Lease", None),
        ("tenure._client.session", "from tenure.recipes.rwlock import RWLock", UP),
        ("tenure.newcomer", "from tenure._client.session import Session", None),
        ("tenure.newcomer", "import tenure.server.app", UP),
        ("tenure.recipes.rwlock", "from tenure import Session", None),
        ("tenure.recipes.rwlock", "from tenure.server import app", UP),
        ("tenure.recipes.rwlock", "from tenure._client.watch import Watch", None),
        ("tenure.recipes.rwlock", "from tenure.core import rules", PRIMITIVE),
        ("tenure.recipes.rwlock", "from tenure.engines.contract import Place", PRIMITIVE),
        ("tenure.blocking", "import tenure.cli", UP),
        ("tenure.server.app", "from tenure.cli import main", UP),
        ("tenure.cli.run", "from tenure.server.app import serve", None),
        ("tenure.server.app", "from tenure.console import access", None),
        ("tenure.console.app", "from tenure.server.app import serve", UP),
        ("tenure.console.app", "import starlette.routing", None),
        ("tenure.console.app", "import requests", OUTSIDE),
        ("tenure.__main__", "from tenure.cli import main", None),
        ("tenure", "from tenure._client.client import connect", None),
        # wherever it stands
        ("tenure.core.queue", "if TYPE_CHECKING:\n    from tenure._client.lease import Lease", UP),
        ("tenure.core.queue", "def f():\n    import tenure._client.lease", UP),
        ("tenure.core.queue", "import_module('tenure._client.lease')", UP),
        ("tenure.core.queue", "importlib.import_module('asyncio')", NO_WORLD),
        ("tenure.core.queue", "from .._client.lease import Lease", UP),
        ("tenure.core.queue", "from .. import Lease", UP),
        ("tenure.core.queue", "from . import rules", None),
        # the core's purity
        ("tenure.core.node", "import asyncio", NO_WORLD),
        ("tenure.core.node", "import heapq", None),
        ("tenure.core.node", "from time import monotonic", NO_WORLD),
        ("tenure.core.node", "import os.path", NO_WORLD),
        ("tenure.core.node", "import sqlite3, socket, random, threading", NO_WORLD),
        ("tenure.model", "import threading", NO_WORLD),
        ("tenure.wire.messages", "import asyncio", NO_WORLD),
        ("tenure.wire.messages", "import time", NO_WORLD),
        ("tenure.clock", "import time", None),
        # the standard library alone
        ("tenure._client.session", "import anyio", OUTSIDE),
        ("tenure.engines.sqlite", "import sqlite3", None),
        ("tenure.engines.sqlite", "import aiosqlite", OUTSIDE),
        ("tenure.engines.memory", "from sortedcontainers import SortedDict", OUTSIDE),
        ("tenure.core.node", "import sortedcontainers", OUTSIDE),
        ("tenure.core.node", "import msgspec", OUTSIDE),
        ("tenure.wire.messages", "import msgspec", None),
        ("tenure.engines.native.reconnector", "import msgspec", None),
        ("tenure.engines.ydb.session", "import grpc", None),
        ("tenure.engines.ydb.session", "from ydb import _apis", PRIVATE),
        ("tenure.engines.ydb.session", "import_module('ydb._grpc.common.protos')", PRIVATE),
        ("tenure.wire.ydb", "from google.protobuf import message_factory", None),
        ("tenure.engines.sqlite", "import msgspec", OUTSIDE),
        ("tenure._client.lease", "import rich", OUTSIDE),
        ("tenure.cli", "import click", None),
        ("tenure.cli.tables", "from rich.table import Table", None),
        ("tenure.cli.tables", "import requests", OUTSIDE),
        ("tenure.server.app", "import msgspec", None),
        ("tenure.server.app", "import requests", OUTSIDE),
        ("tenure.server.app", "from tenure.engines.contract import Engine", None),
        ("tenure.testing.histories", "from hypothesis import given", None),
        ("tenure.testing.histories", "import rich", OUTSIDE),
        # engines, through the door
        ("tenure._client.client", "from tenure.engines import connect_engine", None),
        ("tenure._client.client", "from tenure.engines.contract import Engine", None),
        ("tenure._client.client", "from tenure.engines import contract", None),
        ("tenure._client.client", "from tenure.engines.memory import connect", DOOR),
        ("tenure._client.client", "from tenure.engines.shared import helper", DOOR),
        ("tenure.server.app", "import tenure.engines.sqlite.schema", DOOR),
        ("tenure.cli.run", "from tenure.engines.sqlite import default_path", None),
        ("tenure.engines.sqlite", "from tenure.engines.memory import connect", ALONE),
        ("tenure.engines.sqlite.turn", "from tenure.engines.sqlite.schema import V1", None),
        ("tenure.engines.sqlite.turn", "from tenure.engines.shared import helper", None),
        # fences
        ("tenure.fencing.sql", "from tenure.fencing.tokens import Token", None),
        ("tenure.fencing.sql", "from tenure.errors import StaleToken", None),
        ("tenure.fencing.sql", "from tenure.core import rules", FENCE),
        ("tenure.fencing.sql", "from tenure.model import Leader", FENCE),
        ("tenure.fencing.sql", "import sqlalchemy", OUTSIDE),
        ("tenure.core.node", "from tenure.fencing import Fence", UP),
        ("tenure.cli.run", "from tenure.fencing import Fence", None),
        # testing
        ("tenure._client.session", "import tenure.testing", TESTING),
        ("tenure.cli.ls", "from tenure.testing import VirtualClock", TESTING),
        ("tenure.cli.demo", "from tenure.testing import check_history", None),
        ("tenure.cli.commands.simulate", "from tenure.testing import VirtualClock", None),
        ("tenure.testing.conformance", "from tenure.engines.memory import connect", None),
        ("tenure.testing.conformance", "from tenure._client.client import Client", None),
        ("tenure.testing.conformance", "from tenure.cli import main", "is a library"),
    ],
)
def test_the_checker_finds_what_is_planted(
    importer: str, source: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tenure.core.rules", "tenure.engines.contract", "tenure.server.app"):
        monkeypatch.setitem(FILES, module, PACKAGE / "planted.py")
    found = complaints(importer, source)
    if reason is None:
        assert found == []
    else:
        assert found
        assert all(reason in complaint for complaint in found)


def test_a_package_resolves_its_relative_imports_from_itself() -> None:
    assert list(imports_of("tenure.core", "from .queue import Queue", package=True)) == [
        (1, "tenure.core.queue")
    ]
    assert list(imports_of("tenure.core.queue", "from .rules import check")) == [
        (1, "tenure.core.rules")
    ]
