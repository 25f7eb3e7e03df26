"""`tenure dflockd`: a server for dflockd's clients, told what to do as dflockd's own is told."""

from __future__ import annotations

import os
from typing import Any

import click

from tenure.cli.mistakes import Mistake
from tenure.cli.output import safe
from tenure.cli.serve import run_server
from tenure.cli.status import Status
from tenure.cli.store import asked_for
from tenure.server.dflockd.flags import FLAGS, settings_of
from tenure.server.settings import Wrong

__all__ = ["dflockd"]


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
    epilog="Every flag is also a variable, as of dflockd's own server: DFLOCKD_PORT, "
    "DFLOCKD_DEFAULT_LEASE_TTL_S. A flag counts more than its variable. docs/dflockd.md tells more."
)
@_flags
@click.option("--store", metavar="URL", help="Where the locks are kept; as of 'tenure serve'.")
@click.option("--node", metavar="PATH", default="/dflockd", help="Their node.  [/dflockd]")
@click.option("--log-format", metavar="text|json", help="How the log is written.  [text]")
def dflockd(store: str | None, node: str, log_format: str | None, **given: Any) -> int:
    """Serve dflockd's clients, in the place of its own server.

    The locks are tenure's: 'tenure ls' and 'tenure top' show them, and they outlive a restart.
    'tenure serve --listen dflockd://HOST:PORT' does the same beside other listeners.
    """
    if asked_for() is not None:
        raise Mistake(Status.USAGE, "--url is for clients; a server's store is --store")
    typed: dict[str, str | None] = {}
    for flag in FLAGS:
        name = flag.name.replace("-", "_")
        typed[flag.name] = "false" if given.get(f"no_{name}") else given[name]
    try:
        settings = settings_of(typed, os.environ, store=store, node=node, log_format=log_format)
        return run_server(settings)
    except Wrong as wrong:
        for fault in wrong.faults[:-1]:
            click.echo(f"tenure: {safe(fault)}", err=True)
        raise Mistake(Status.USAGE, safe(wrong.faults[-1])) from None
