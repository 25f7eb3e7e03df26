"""Schema of a store in the database: its SQL, its creation, its versions and their upgrades.

A change of the SQL is another version, with an entry in `MIGRATIONS`. An upgrade runs the entries
that the store does not have yet, and replaces the functions. Programs of version `SERVES` and later
can use the result, so they may run meanwhile.
"""

from __future__ import annotations

import secrets
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
    parts = "\n".join(map(_text, _PARTS)).replace("SCHEMA", schema)
    # The name was checked when the URL was parsed.
    return f"""BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL lock_timeout = 0;
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('tenure'), hashtext('{schema}'));
CREATE SCHEMA {schema};
{parts}
INSERT INTO {schema}.meta (version, serves, epoch, server, place) VALUES ({VERSION}, {SERVES},
    '{secrets.token_hex(8)}', {schema}.server_name(), '{schema}.meta'::regclass);
INSERT INTO {schema}.witness
    SELECT epoch, place, relaxed, quarantined_until FROM {schema}.meta;
INSERT INTO {schema}.nodes (path, config)
    VALUES ('{DEFAULT_NODE}', '{config_text(NodeConfig())}');
SELECT setval('{schema}.order_ids', (extract(epoch FROM clock_timestamp()) * 1e6)::bigint);
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC;
COMMIT;
"""  # noqa: S608


def upgrade(schema: str) -> str:
    """Return the SQL that brings a store to this version, one transaction.

    It changes nothing in a store of this version, and fails in a later one. It waits three seconds
    for a lock that a program has, so that others do not wait behind it for long.
    """
    steps = [_step(version, text) for version, text in sorted(MIGRATIONS.items())]
    parts = "\n".join([*steps, *map(_text, _FUNCTIONS)]).replace("SCHEMA", schema)
    return f"""BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL lock_timeout = '3s';
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('tenure'), hashtext('{schema}'));
DO $upgrade$
BEGIN
    IF (SELECT version FROM {schema}.meta) > {VERSION} THEN
        RAISE 'the schema has version %, and this tenure has {VERSION}',
            (SELECT version FROM {schema}.meta) USING HINT = 'Upgrade tenure.';
    END IF;
END $upgrade$;
{parts}
UPDATE {schema}.meta SET version = {VERSION}, serves = {SERVES}
    WHERE version <> {VERSION} OR serves <> {SERVES};
-- Accounts that may use the store may use its new functions.
DO $upgrade$
DECLARE
    it text;
BEGIN
    FOR it IN SELECT oid::regprocedure FROM pg_proc
        WHERE pronamespace = '{schema}'::regnamespace AND proacl IS NULL
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', it);
    END LOOP;
    FOR it IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
        FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname = 'hello'
            AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO %s', it);
    END LOOP;
END $upgrade$;
COMMIT;
"""  # noqa: S608


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
