"""`tenure token`: the named tokens of a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from tenure.cli.app import CommandGroup
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import a_span, complete, json_option
from tenure.cli.output import Column, print_json, safe, say, table
from tenure.errors import InvalidArgument
from tenure.server.auth.editing import add_token, finish_rotation, revoke_token, rotate_token
from tenure.server.auth.identity import EVERYTHING, Access
from tenure.server.auth.tokens import Rights, Token, read_tokens, written_hash
from tenure.server.settings import PREFIX

F = TypeVar("F", bound=Callable[..., Any])

_VARIABLE = PREFIX + "AUTH_TOKEN_FILE"
_RELOAD = "Reload the server (SIGHUP, 'systemctl reload') for this to take effect."

_file_option = click.option(
    "--file",
    metavar="FILE",
    help=f"The token file of the server.  [{_VARIABLE}]",
    shell_complete=complete("files"),
)


def _prefixes(level: Access, what: str) -> Callable[[F], F]:
    """Return the option for a level of access to nodes."""
    return click.option(
        f"--{level.name.lower()}",
        level.name.lower(),
        metavar="PREFIX",
        multiple=True,
        help=f"{what} on the nodes below PREFIX; may be given several times.",
    )


@click.group(cls=CommandGroup)
def token() -> None:
    """Make, list and revoke a server's tokens.

    They are in a file that 'tenure serve --auth-token-file FILE' reads when it starts and on
    SIGHUP. The file contains no token, only a hash of each.
    """


@token.command()
@click.argument("name")
@_prefixes(Access.READ, "Allow to list, describe and watch")
@_prefixes(Access.HOLD, "Allow to acquire, and to write semaphores, too,")
@_prefixes(Access.ADMINISTER, "Allow everything")
@click.option(
    "--expires-in", "span", metavar="TIME", type=a_span, help="Lifetime: 12h, 90d.  [for ever]"
)
@_file_option
@json_option
def new(
    name: str,
    read: tuple[str, ...],
    hold: tuple[str, ...],
    administer: tuple[str, ...],
    span: float | None,
    file: str | None,
    *,
    as_json: bool,
) -> None:
    """Make a token for NAME, and print it, this once.

    Without --read, --hold and --administer it allows everything. Otherwise it allows what these
    options say; the longest prefix of a node decides.
    """
    path = _path(file)
    permissions: dict[str, str] = {}
    for level, prefixes in ("read", read), ("hold", hold), ("administer", administer):
        for prefix in prefixes:
            if prefix in permissions:
                raise Mistake(Status.USAGE, f"{prefix} has two levels: give one of them")
            permissions[prefix] = level
    expires = None if span is None else datetime.now(UTC) + timedelta(seconds=span)
    secret = add_token(path, name, permissions or None, expires)
    if as_json:
        print_json({"name": name, "token": secret, "file": path})
        return
    click.echo(secret)
    click.echo(
        f"tenure: {safe(name)} is in {safe(path)}. Store the token now, it is not shown again. "
        + _RELOAD,
        err=True,
    )


@token.command("ls")
@_file_option
@json_option
def list_tokens(file: str | None, *, as_json: bool) -> None:
    """List the tokens of a file, and their permissions."""
    path = _path(file)
    tokens = read_tokens(path).tokens
    if as_json:
        print_json({"file": path, "tokens": [_json(each) for each in tokens]})
    elif tokens:
        now = datetime.now(UTC)
        table(
            [
                Column("Name", style="bold", text=True, keep=True),
                Column("Hash"),
                Column("Permissions", text=True, keep=True),
                Column("Quotas", text=True),
                Column("Expires"),
            ],
            [
                [
                    each.name,
                    each.digest.hex()[:8],
                    _permissions(each.rights),
                    " ".join(f"{name}={number}" for name, number in _quotas(each.rights).items()),
                    _expiry(each, now),
                ]
                for each in tokens
            ],
        )
    else:
        say(f"{safe(path)} has no tokens")


@token.command()
@click.argument("name")
@click.option("--finish", is_flag=True, help="Finish: the former token becomes invalid.")
@_file_option
@json_option
def rotate(name: str, file: str | None, *, finish: bool, as_json: bool) -> None:
    """Make a second token for NAME, with the same permissions.

    Both are valid until --finish. Clients that switch to the new one before then keep their
    sessions.
    """
    path = _path(file)
    if finish:
        finish_rotation(path, name)
        click.echo(f"tenure: {safe(name)} now has only its newest token. {_RELOAD}", err=True)
        return
    secret = rotate_token(path, name)
    if as_json:
        print_json({"name": name, "token": secret, "file": path})
        return
    click.echo(secret)
    click.echo(
        f"tenure: {safe(name)} has this token, too. Store it now, it is not shown again. {_RELOAD}",
        err=True,
    )


@token.command()
@click.argument("name")
@_file_option
def revoke(name: str, file: str | None) -> None:
    """Revoke the token of NAME.

    The server closes its connections when it reads the file again.
    """
    path = _path(file)
    revoke_token(path, name)
    click.echo(f"tenure: {safe(name)} is revoked in {safe(path)}. {_RELOAD}", err=True)
    why = _shut_out(path)
    if why is not None:
        click.echo(
            f"tenure: now {safe(path)} {why}. A server refuses to load such a file, and keeps "
            f"the former one: make another token first ('tenure token new'), or stop the "
            "server.",
            err=True,
        )


def _shut_out(path: str) -> str | None:
    try:
        return read_tokens(path).shut_out(datetime.now(UTC))
    except InvalidArgument:
        return "has no token"


def _path(file: str | None) -> str:
    path = file or os.environ.get(_VARIABLE)
    if not path:
        raise Mistake(Status.USAGE, f"which token file? give --file FILE, or set {_VARIABLE}")
    return path


def _json(each: Token) -> dict[str, object]:
    everything = each.rights.permissions == EVERYTHING
    levels = {
        prefix: access.name.lower() for prefix, access in each.rights.permissions.prefixes.items()
    }
    return {
        "name": each.name,
        "hash": written_hash(each.digest),
        "permissions": None if everything else levels,
        "quotas": _quotas(each.rights),
        "expires": None if each.expires is None else each.expires.astimezone(UTC).isoformat(),
    }


def _permissions(rights: Rights) -> str:
    if rights.permissions == EVERYTHING:
        return "everything"
    levels = rights.permissions.prefixes.items()
    return " ".join(f"{prefix}={access.name.lower()}" for prefix, access in levels) or "nothing"


def _quotas(rights: Rights) -> dict[str, int]:
    quotas = rights.quotas
    numbers = {name: getattr(quotas, name) for name in quotas.__slots__}
    return {name: number for name, number in numbers.items() if number is not None}


def _expiry(each: Token, now: datetime) -> str:
    if each.expires is None:
        return ""
    moment = f"{each.expires.astimezone(UTC):%Y-%m-%d %H:%M}Z"
    return f"{moment} (expired)" if each.expires <= now else moment
