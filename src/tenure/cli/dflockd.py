"""`tenure dflockd`: a server for dflockd's clients, with the command line of dflockd's server."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

import click

from tenure import __version__
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.output import safe
from tenure.cli.serve import run_server
from tenure.cli.store import given_url
from tenure.server.dflockd.flags import FLAGS, settings_of
from tenure.server.settings import Wrong

_SWITCHES = [flag.name for flag in FLAGS if flag.kind == "switch"]
_WITHOUT_VALUE = {
    "-h",
    "--help",
    "--version",
    *(f"--{name}" for name in _SWITCHES),
    *(f"--no-{name}" for name in _SWITCHES),
}


class _OneDashOrTwo(click.Command):
    """A command whose options may be written with one dash, as Go's programs accept them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {option for each in self.get_params(ctx) for option in each.opts}
        return super().parse_args(ctx, list(_with_two_dashes(args, options)))


def _with_two_dashes(args: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """Rewrite the options among `args` with two dashes; their values are not changed."""
    rest = iter(args)
    for word in rest:
        if word == "--":
            yield word
            break
        option, equals, value = word.partition("=")
        if f"-{option}" in options:
            option = f"-{option}"
        yield f"{option}{equals}{value}"
        if option in options and option not in _WITHOUT_VALUE and not equals:
            yield from islice(rest, 1)
    yield from rest


def _flags(command: Any) -> Any:
    for flag in reversed(FLAGS):
        shown = "" if flag.default is None else str(flag.default).lower()
        about = f"{flag.about}  [{shown}]" if shown else flag.about
        if flag.kind == "switch":
            command = click.option(
                f"--no-{flag.name}", f"no_{flag.name.replace('-', '_')}", is_flag=True, hidden=True
            )(command)
            command = click.option(
                f"--{flag.name}", metavar="[=BOOL]", is_flag=False, flag_value="true", help=about
            )(command)
        else:
            file = flag.name in {"tls-cert", "tls-key", "auth-token-file"}
            metavar = "N" if flag.kind == "count" else "FILE" if file else "TEXT"
            command = click.option(f"--{flag.name}", metavar=metavar, help=about)(command)
    return command


@click.command(
    cls=_OneDashOrTwo,
    epilog="As in dflockd's own server, every flag is also a variable: DFLOCKD_PORT, "
    "DFLOCKD_DEFAULT_LEASE_TTL_S. A flag overrides its variable, and may have one dash. "
    "docs/operate/dflockd-clients.md has the details.",
)
@_flags
@click.option("--store", metavar="URL", help="The store of the locks, as for 'tenure serve'.")
@click.option(
    "--node", metavar="PATH", default="/dflockd", help="The node of the locks.  [/dflockd]"
)
@click.option("--log-format", metavar="text|json", help="The format of the log.  [text]")
@click.version_option(__version__, "--version", message="%(version)s")
def dflockd(store: str | None, node: str, log_format: str | None, **given: Any) -> int:
    """Serve dflockd's clients, as a replacement of dflockd's server.

    The locks are tenure's: 'tenure ls' and 'tenure top' show them, and they survive a restart.
    'tenure serve --listen dflockd://HOST:PORT' does the same, together with other listeners.
    """
    if given_url() is not None:
        raise Mistake(Status.USAGE, "--url is for clients; a server's store is --store")
    typed: dict[str, str | None] = {}
    for flag in FLAGS:
        name = flag.name.replace("-", "_")
        typed[flag.name] = "false" if given.get(f"no_{name}") else given[name]
    ignored: list[str] = []
    try:
        settings = settings_of(
            typed, os.environ, store=store, node=node, log_format=log_format, ignore=ignored.append
        )
        return run_server(settings, ignored)
    except Wrong as wrong:
        for fault in wrong.faults[:-1]:
            click.echo(f"tenure: {safe(fault)}", err=True)
        raise Mistake(Status.USAGE, safe(wrong.faults[-1])) from None
