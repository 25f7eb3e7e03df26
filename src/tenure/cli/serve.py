"""`tenure serve`: its options, and the output of `--check`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from tenure import TenureError
from tenure.cli.doctor import finding_json, show_finding
from tenure.cli.mistakes import Mistake, Status, after_signal, explain
from tenure.cli.options import json_option
from tenure.cli.output import Column, print_json, safe, say, table
from tenure.cli.store import given_url
from tenure.doctor import Finding, healthy, summary, without_secrets
from tenure.server.settings import PREFIX, SETTINGS, Setting, Settings, Wrong
from tenure.server.sources import load

F = TypeVar("F", bound=Callable[..., Any])

_STDERR = 2

_EXIT_CODES = (
    ("0", "ended by SIGTERM or Ctrl-C, in order"),
    (str(int(Status.DEFECT)), "a defect in tenure"),
    (str(int(Status.STORE)), "the store or an address cannot be used; or the end was forced"),
    (str(int(Status.USAGE)), "wrong settings"),
    ("128+n", "ended at once, by a second signal n"),
)


class _InSections(click.Command):
    """Its help lists the limits separately."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limits = {_argument(each) for each in SETTINGS if each.limit}
        rows: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                rows[parameter.name in limits].append(row)
        with formatter.section("Options"):
            formatter.write_dl(rows[False])
        with formatter.section("Limits on the server's resources for clients"):
            formatter.write_dl(rows[True])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl(list(_EXIT_CODES))
        super().format_epilog(ctx, formatter)


def _argument(setting: Setting) -> str:
    return setting.name.replace("-", "_")


def _setting_options(command: F) -> F:
    for setting in reversed(SETTINGS):
        metavar = "|".join(setting.choices) if setting.choices else setting.metavar
        about = setting.about
        if setting.default not in {None, ()}:
            default = setting.default
            if setting.kind == "texts":
                default = " ".join(default)
            about += f"  [{default:,}]" if setting.kind == "count" else f"  [{default}]"
        command = click.option(
            f"--{setting.name}",
            metavar=metavar,
            multiple=setting.kind == "texts",
            help=about,
        )(command)
    return command


@click.command(
    cls=_InSections,
    epilog="Every option is also a variable of the environment (--log-level: "
    f"{PREFIX}LOG_LEVEL) and a key of the file (log-level). An option overrides the "
    "environment, and the environment the file. docs/operate/server.md has the details.",
)
@click.option("--config", metavar="FILE", help="A file of settings, in TOML.")
@click.option("--check", is_flag=True, help="Check the settings, and exit.")
@_setting_options
@json_option
def serve(config: str | None, *, check: bool, as_json: bool, **options: Any) -> int:
    """Put a store on the network.

    Clients use it as tenure://HOST:PORT. Without options it serves your own SQLite file, on this
    machine only. SIGTERM and Ctrl-C end it in order. Neither that nor a crash loses a session or a
    lease, if the client reconnects within its recovery window.
    """
    if given_url() is not None:
        raise Mistake(Status.USAGE, "--url is for clients; a server's store is --store")
    if as_json and not check:
        raise Mistake(Status.USAGE, "--json goes with --check; for the log there is --log-format")
    given = {each.name: options[_argument(each)] for each in SETTINGS}
    try:
        settings = load(given, os.environ, config)
        return _check(settings, as_json=as_json) if check else run_server(settings)
    except Wrong as wrong:
        if check and as_json:
            print_json({"usable": False, "faults": list(wrong.faults)})
            return Status.USAGE
        for fault in wrong.faults[:-1]:
            click.echo(f"tenure: {safe(fault)}", err=True)
        raise Mistake(Status.USAGE, safe(wrong.faults[-1])) from None


def run_server(settings: Settings, cautions: Sequence[str] = ()) -> int:
    """Serve until a signal ends it, and return the exit code.

    Args:
        settings: the options of the server.
        cautions: warnings to log first.
    """
    from tenure.server.log import LOGGER, log_event, log_uncaught, open_standard_files, set_up
    from tenure.server.process import run

    open_standard_files()
    handler = set_up(settings.log_format, settings.log_level, _STDERR)
    log_uncaught()
    for caution in cautions:
        log_event(LOGGER, logging.WARNING, "take care", found=caution)
    try:
        ending = run(settings, os.environ)
    except TenureError as error:
        # Readers of our output now expect log lines.
        status, why = explain(error) or (Status.DEFECT, str(error))
        log_event(LOGGER, logging.ERROR, "the server ends", why=why)
        return status
    finally:
        handler.close()
    if not ending.in_order:
        # A thread still runs, and Python's normal exit would wait for it.
        os._exit(after_signal(ending.signal) if ending.signal else Status.STORE)
    return Status.DONE


# --check


def _check(settings: Settings, *, as_json: bool) -> int:
    from tenure.server.process import examine

    named, store = asyncio.run(examine(settings))
    findings = named + store
    fine = healthy(findings)
    if as_json:
        print_json(
            {
                "usable": fine,
                "settings": {name: _as_json(settings, name) for name in settings.given},
                "findings": [finding_json(each) for each in findings],
            }
        )
    else:
        _show(settings, findings, fine=fine)
    if not healthy(named):
        return Status.USAGE
    return Status.DONE if fine else Status.STORE


def _as_json(settings: Settings, name: str) -> dict[str, Any]:
    given = settings.given[name]
    value = without_secrets(given.value) if name == "store" else given.value
    return {"value": value, "from": given.origin or "default"}


def _show(settings: Settings, findings: list[Finding], *, fine: bool) -> None:
    rows = []
    for name, given in settings.given.items():
        value = given.value
        if name == "store":
            value = without_secrets(value)
        shown = " ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
        rows.append((name, safe(shown), safe(given.origin or "default")))
    table((Column("setting", keep=True), Column("value", keep=True), Column("from")), rows)
    say()
    for finding in findings:
        show_finding(finding)
    say()
    say(summary(findings), style="bold green" if fine else "bold red")
