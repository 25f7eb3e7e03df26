"""`tenure doctor`: prints the findings of `tenure.doctor`."""

from __future__ import annotations

import dataclasses

import click

from tenure.cli.mistakes import Status
from tenure.cli.options import json_option, url_option
from tenure.cli.output import is_terminal, print_json, safe, say
from tenure.cli.store import given_url
from tenure.doctor import Finding, examine, healthy, summary

_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}
_SIGNS = {"ok": "✓", "warning": "!", "failure": "✗"}


@click.command()
@json_option
@url_option
def doctor(*, as_json: bool) -> int:
    """Examine and test the store.

    It checks the choice of the store, the machine, the file system, permissions and other users of
    the store, and takes a lock and hands it over. Each finding says, where needed, how to repair
    it. It works when the store does not, and never creates a store.

    Exits with 0 when the store can be used, even with warnings, else with 74. Without click and
    rich, use: python -m tenure.doctor.
    """
    findings = []
    for finding in examine(given_url()):
        findings.append(finding)
        if not as_json:
            show_finding(finding)
    fine = healthy(findings)
    if as_json:
        print_json({"usable": fine, "findings": [finding_json(each) for each in findings]})
    else:
        say()
        say(summary(findings), style="bold green" if fine else "bold red")
    return Status.DONE if fine else Status.STORE


def finding_json(finding: Finding) -> dict[str, str]:
    """Return a finding for scripts."""
    described = dataclasses.asdict(finding)
    del described["absent"]
    return described


def show_finding(finding: Finding) -> None:
    """Print a finding for people."""
    what, found, remedy = safe(finding.what), safe(finding.found), safe(finding.remedy)
    if not is_terminal():
        say(f"{finding.level:<8} {what:<16}  {found}")
        if remedy:
            say(f"{'':27}-> {remedy}")
        return
    from rich.table import Table
    from rich.text import Text

    from tenure.cli.output import terminal

    # One row at a time, so that slow checks are visible.
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(width=15)
    row.add_column(overflow="fold")
    style = _STYLES[finding.level]
    text = Text(found, style="" if finding.level == "ok" else style)
    if remedy:
        text.append(f"\n→ {remedy}", style="bold")
    row.add_row(Text(_SIGNS[finding.level], style=style), Text(what, style="bold"), text)
    terminal().print(row)
