"""`tenure node`: nodes, the namespaces of sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import click

import tenure
from tenure.cli.app import CommandGroup
from tenure.cli.look import program, remark
from tenure.cli.options import a_duration, complete, json_option, run_async, url_option
from tenure.cli.output import Column, duration, print_json, safe, say, table
from tenure.cli.store import open_store
from tenure.shown import session_json

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=CommandGroup)
def node() -> None:
    """Manage nodes, the namespaces.

    A node's path is like /billing/jobs. The node /default always exists. Others are created
    explicitly, so that a mistyped path never splits one lock into two.
    """


def _config_options(command: F) -> F:
    consistency = click.Choice(["strict", "relaxed"])
    for option in (
        click.option(
            "--self-check-period",
            metavar="S",
            type=a_duration,
            default=0.0,
            help="Seconds between a node's checks of itself.",
        ),
        click.option(
            "--session-grace-period",
            metavar="S",
            type=a_duration,
            default=0.0,
            help="Seconds added to the sessions' recovery windows after a restart of the store.",
        ),
        click.option(
            "--read-consistency", type=consistency, default=None, help="Stored for YDB's clients."
        ),
        click.option(
            "--attach-consistency", type=consistency, default=None, help="Stored for YDB's clients."
        ),
        click.option(
            "--rate-limiter-counters-mode",
            type=click.Choice(["aggregated", "detailed"]),
            default=None,
            help="Stored for YDB's clients.",
        ),
    ):
        command = option(command)
    return command


def _config(options: dict[str, Any]) -> tenure.NodeConfig:
    return tenure.NodeConfig(**{name: value for name, value in options.items() if value})


@node.command()
@click.argument("path")
@click.option("--exist-ok", is_flag=True, help="Accept an existing node; it is not changed.")
@_config_options
@url_option
def create(path: str, *, exist_ok: bool, **options: Any) -> None:
    """Create the node PATH."""

    async def work() -> None:
        async with open_store(create=True) as client:
            await client.create_node(path, _config(options), exist_ok=exist_ok)

    run_async(work())


@node.command()
@click.argument("path", shell_complete=complete("nodes"))
@_config_options
@url_option
def alter(path: str, **options: Any) -> None:
    """Change the configuration of the node PATH.

    Options that are not given do not change.
    """

    async def work() -> None:
        async with open_store() as client:
            await client.alter_node(path, _config(options))

    run_async(work())


@node.command()
@click.argument("path", shell_complete=complete("nodes"))
@click.option("--force", is_flag=True, help="Drop it even when sessions are attached; they expire.")
@url_option
def drop(path: str, *, force: bool) -> None:
    """Drop the node PATH with everything on it."""

    async def work() -> None:
        async with open_store() as client:
            await client.drop_node(path, force=force)

    run_async(work())


@node.command("ls")
@json_option
@url_option
def list_nodes(*, as_json: bool) -> None:
    """List the nodes."""

    async def work() -> list[tenure.NodeDescription]:
        async with open_store() as client:
            return [await client.describe_node(path) for path in await client.list_nodes()]

    nodes = run_async(work())
    if as_json:
        print_json({"nodes": [dataclasses.asdict(each) for each in nodes]})
        return
    rows = [[each.path, _known(each.sessions), _known(each.semaphores)] for each in nodes]
    table(
        [
            Column("Node", style="bold", text=True, keep=True),
            Column("Sessions", right=True),
            Column("Semaphores", right=True),
        ],
        rows,
    )


@node.command()
@click.argument("path", default=tenure.model.DEFAULT_NODE, shell_complete=complete("nodes"))
@json_option
@url_option
def describe(path: str, *, as_json: bool) -> None:
    """Show a node's configuration, and its sessions.

    PATH is /default if it is not given.
    """

    async def work() -> tuple[tenure.NodeDescription, list[tenure.SessionDescription]]:
        async with open_store() as client:
            return await client.describe_node(path), list(await client.list_sessions(path))

    described, sessions = run_async(work())
    if as_json:
        print_json(
            dataclasses.asdict(described)
            | {"session_list": [session_json(each) for each in sessions]}
        )
        return
    say(path, style="bold blue")
    for name, value in dataclasses.asdict(described.config).items():
        shown = "default" if value in (0, "unset") else value
        say(f"  {name.replace('_', ' ')}: {shown}{' s' if isinstance(shown, float) else ''}")
    say()
    if not sessions:
        say("no sessions")
        return
    table(SESSION_COLUMNS, [session_row(each) for each in sessions])


SESSION_COLUMNS = (
    Column("Session", style="bold", right=True, keep=True),
    Column("Attached", keep=True),
    Column("Silent for", right=True),
    Column("Window", right=True),
    Column("Process", right=True, keep=True),
    Column("Host", text=True),
    Column("Program", text=True),
    Column("Description", text=True),
)


def session_row(each: tenure.SessionDescription) -> list[str]:
    """Return a session in those columns."""
    attached = {True: "yes", False: "no", None: ""}[each.attached]
    return [
        str(each.id),
        attached,
        duration(each.silent_for),
        duration(each.recovery_window),
        _known(each.pid),
        safe(each.host or ""),
        program(each),
        remark(each),
    ]


def _known(value: int | None) -> str:
    return "" if value is None else str(value)
