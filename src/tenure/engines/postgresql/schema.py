"""Schema of a store in the database: its SQL, its creation and its version."""

from __future__ import annotations

import secrets
from functools import cache
from importlib import resources

from tenure.engines._kit.commands.values import config_text
from tenure.model import DEFAULT_NODE, NodeConfig

__all__ = ["VERSION", "creation"]

VERSION = 1
_PARTS = ("tables", "functions", "sessions", "administration")


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
INSERT INTO {schema}.meta (version, epoch, server, place)
    VALUES ({VERSION}, '{secrets.token_hex(8)}', {schema}.server_name(), '{schema}.meta'::regclass);
INSERT INTO {schema}.witness SELECT epoch FROM {schema}.meta;
INSERT INTO {schema}.nodes (path, config)
    VALUES ('{DEFAULT_NODE}', '{config_text(NodeConfig())}');
SELECT setval('{schema}.order_ids', (extract(epoch FROM clock_timestamp()) * 1e6)::bigint);
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC;
COMMIT;
"""  # noqa: S608
