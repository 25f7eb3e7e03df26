"""`tenure postgresql`: the schema of a PostgreSQL store, created and upgraded by administrators."""

from __future__ import annotations

import os

import click

from tenure import Unsupported
from tenure.cli.app import CommandGroup
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import url_option
from tenure.cli.output import safe, say
from tenure.cli.store import chosen_url, given_url
from tenure.engines import split_client_parameters
from tenure.engines._kit.url import needs_extra

_SCHEMES = ("postgresql", "postgres")


@click.group(cls=CommandGroup)
def postgresql() -> None:
    """Create and upgrade the schema of a PostgreSQL store.

    Programs create the schema on first use if their account may create schemas. Otherwise an
    administrator creates it.
    """


@postgresql.command()
@click.option("--print-sql", is_flag=True, help="Print the SQL without running it.")
@click.option(
    "--role", metavar="NAME", help="The programs' account: it may use the store, but not alter it."
)
@url_option
def init(*, print_sql: bool, role: str | None) -> None:
    """Create the schema of the store.

    The URL names the database and, with ?schema=NAME, the schema (default: 'tenure').

    An administrator can run the output of --print-sql, for example with psql.

    Exits with 73 if the schema exists already.
    """
    url = _postgresql_url(print_sql=print_sql)
    with needs_extra("postgresql", "postgresql"):
        from tenure.engines.postgresql.schema import initialize, script
        from tenure.engines.postgresql.url import parse

    address = parse(url)
    if print_sql:
        click.echo(script(address, role), nl=False)
        return
    if not initialize(address, role):
        unchanged = "" if role is None else f", so {safe(role)} got no rights to it"
        raise Mistake(
            Status.REFUSED,
            f"the schema {address.schema} already exists in {safe(address.url)}{unchanged}; "
            "examine it with 'tenure doctor', upgrade it with 'tenure postgresql upgrade', or "
            "choose another with ?schema=NAME",
        )
    use = "" if role is None else f", which {safe(role)} may use"
    say(f"created the schema {address.schema} in {safe(address.url)}{use}")


@postgresql.command()
@click.option("--print-sql", is_flag=True, help="Print the SQL without running it.")
@url_option
def upgrade(*, print_sql: bool) -> None:
    """Upgrade the schema of the store to this version of tenure.

    The upgrade is one transaction and needs the owner of the schema. Programs may keep running, and
    keep their leases. Upgrade the schema first, then the programs.

    An administrator can run the output of --print-sql, for example with psql.
    """
    url = _postgresql_url(print_sql=print_sql)
    with needs_extra("postgresql", "postgresql"):
        from tenure.engines.postgresql import schema
        from tenure.engines.postgresql.url import parse

    address = parse(url)
    if print_sql:
        click.echo(schema.upgrading(address.schema), nl=False)
        return
    before, after = schema.upgrade(address)
    versions = f"has version {after}" if before == after else f"went from {before} to {after}"
    say(f"the schema {address.schema} in {safe(address.url)} {versions}")


def _postgresql_url(*, print_sql: bool) -> str:
    """Return the URL of the chosen store. Printing the SQL needs no choice.

    Raises:
        Unsupported: the store is not PostgreSQL.
    """
    if print_sql and given_url() is None and not os.environ.get("TENURE_URL"):
        return "postgresql://"
    url = split_client_parameters(chosen_url())[0]
    scheme = url.partition(":")[0].lower()
    if scheme not in _SCHEMES:
        raise Unsupported(
            f"'tenure postgresql' works on postgresql://, not on {scheme}://; name the "
            "database with --url postgresql://HOST/DATABASE"
        )
    return url
