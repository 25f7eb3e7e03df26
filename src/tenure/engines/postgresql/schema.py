"""Schema of a store in the database: its SQL, its creation, its versions and their upgrades.

A change of the SQL is another version, with an entry in `MIGRATIONS`. An upgrade runs the entries
that the store does not have yet, and replaces the functions. Programs of version `SERVES` and later
can use the result, so they may run meanwhile.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import cache
from importlib import resources

from tenure.engines._kit.commands.values import config_text
from tenure.model import DEFAULT_NODE, NodeConfig

__all__ = ["VERSION", "creation", "mismatch", "upgrade"]

VERSION = 1
SERVES = 1
"""Oldest version of programs that the functions serve, besides this one."""
MIGRATIONS: dict[int, str] = {}
"""SQL that changes the tables for a version, if they are those of the version before.

SCHEMA stands for the schema's name. It is the body of a block in PL/pgSQL.
"""
_FUNCTIONS = ("functions", "sessions", "administration")
_PARTS = ("tables", *_FUNCTIONS)


@cache
def _text(part: str) -> str:
    return (resources.files(__package__) / "sql" / f"{part}.sql").read_text("utf-8")


def creation(schema: str) -> str:
    """Return the SQL that creates a store, one transaction.

    Two programs may run it at the same time; the second one finds the schema and fails. It waits
    for the first one, without the timeouts of its account.
    """
    text = _text("create").replace(":epoch", secrets.token_hex(8))
    text = text.replace(":node", DEFAULT_NODE).replace(":config", config_text(NodeConfig()))
    return _filled(text, map(_text, _PARTS), schema)


def upgrade(schema: str) -> str:
    """Return the SQL that brings a store to this version, one transaction.

    It changes nothing in a store of this version, and fails in a later one. It waits three seconds
    for a lock that a program has, so that others do not wait behind it for long.
    """
    steps = [_step(version, text) for version, text in sorted(MIGRATIONS.items())]
    return _filled(_text("upgrade"), [*steps, *map(_text, _FUNCTIONS)], schema)


def _filled(text: str, parts: Iterable[str], schema: str) -> str:
    text = text.replace(":version", str(VERSION)).replace(":serves", str(SERVES))
    text = text.replace(":schema", schema)  # it was checked when the URL was parsed
    return text.replace("--#parts", "\n".join(parts).replace("SCHEMA", schema))


def _step(version: int, text: str) -> str:
    return f"""DO $upgrade$
BEGIN
    IF (SELECT version FROM SCHEMA.meta) < {version} THEN
        UPDATE SCHEMA.meta SET version = {version};
{text}
    END IF;
END $upgrade$;"""  # noqa: S608


def mismatch(version: int, serves: int) -> str:
    """Return what to do if this program cannot use a store, or an empty text.

    Args:
        version: of the store.
        serves: the oldest version of programs that the store serves.
    """
    if version < VERSION:
        return "have an administrator run 'tenure postgresql upgrade'"
    return "upgrade tenure here" if serves > VERSION else ""
