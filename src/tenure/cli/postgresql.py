"""`tenure postgresql`: the schema of a PostgreSQL store, created and upgraded by administrators."""

from __future__ import annotations

import os

import click

from tenure import Unsupported
from tenure.cli.app import CommandGroup
from tenure.cli.mistakes import Mistake
from tenure.cli.options import url_option
from tenure.cli.output import safe, say
from tenure.cli.status import Status
from tenure.cli.store import chosen_url, given_url
from tenure.engines import split_answer_timeout
from tenure.engines._kit.extras import needs_extra

__all__ = ["postgresql"]

_SCHEMES = ("postgresql", "postgres")


@click.group(cls=CommandGroup)
def postgresql() -> None:
    """Create and upgrade the schema of a PostgreSQL store.

    Programs create it on first use, if their account may. Otherwise an administrator does so.
    """


@postgresql.command()
@click.option("--print-sql", is_flag=True, help="Print the SQL, and run nothing.")
@click.option(
    "--role", metavar="NAME", help="The account of the programs: it may use the store, no more."
)
@url_option
def init(*, print_sql: bool, role: str | None) -> None:
    """Create the schema of the store.

    The URL names the database and, with ?schema=NAME, the schema; it is 'tenure' by default.

    An administrator can run what --print-sql prints, with psql for example.

    Exits with 73 when the schema exists.
    """
    url = _postgresql_url(print_sql=print_sql)
    with needs_extra("postgresql", "postgresql"):
        from tenure.engines.postgresql.initializing import initialize, script
        from tenure.engines.postgresql.url import parse

    address = parse(url)
    if print_sql:
        click.echo(script(address, role), nl=False)
        return
    if not initialize(address, role):
        raise Mistake(
            Status.REFUSED,
            f"the schema {address.schema} exists already in {address.url}; examine it with "
            "'tenure doctor', upgrade it with 'tenure postgresql upgrade', or choose another one "
            "with ?schema=NAME",
        )
    use = "" if role is None else f", which {safe(role)} may use"
    say(f"created the schema {address.schema} in {safe(address.url)}{use}")


@postgresql.command()
@click.option("--print-sql", is_flag=True, help="Print the SQL, and run nothing.")
@url_option
def upgrade(*, print_sql: bool) -> None:
    """Upgrade the schema of the store to this version of tenure.

    It is one transaction, as the owner of the schema. Programs may run meanwhile, and keep their
    leases. Upgrade the schema first, then the programs.

    An administrator can run what --print-sql prints, with psql for example.
    """
    url = _postgresql_url(print_sql=print_sql)
    with needs_extra("postgresql", "postgresql"):
        from tenure.engines.postgresql import initializing, schema
        from tenure.engines.postgresql.url import parse

    address = parse(url)
    if print_sql:
        click.echo(schema.upgrade(address.schema), nl=False)
        return
    before, after = initializing.upgrade(address)
    versions = f"has version {after}" if before == after else f"went from {before} to {after}"
    say(f"the schema {address.schema} in {safe(address.url)} {versions}")


def _postgresql_url(*, print_sql: bool) -> str:
    """Return the chosen store; to print the SQL, none has to be chosen.

    Raises:
        Unsupported: it is none of PostgreSQL.
    """
    if print_sql and given_url() is None and not os.environ.get("TENURE_URL"):
        return "postgresql://"
    url = split_answer_timeout(chosen_url())[0]
    scheme = url.partition(":")[0].lower()
    if scheme not in _SCHEMES:
        raise Unsupported(
            f"'tenure postgresql' works on postgresql://, not on {scheme}://; name the "
            "database with --url postgresql://HOST/DATABASE"
        )
    return url
