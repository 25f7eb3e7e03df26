"""`tenure service`: registered instances of services (`ServiceRegistry`)."""

from __future__ import annotations

import asyncio
import sys
import time

import click

import tenure
from tenure.cli.app import CommandGroup
from tenure.cli.look import program, show_states
from tenure.cli.mistakes import Mistake, Status, after_signal
from tenure.cli.options import (
    a_duration,
    complete,
    json_option,
    name_argument,
    node_option,
    run_async,
    url_option,
    watch_options,
)
from tenure.cli.output import (
    Column,
    duration,
    print_json,
    print_json_line,
    safe,
    say,
    shown_data,
    table,
)
from tenure.cli.run.command import DEFAULT_WINDOW, check_executable
from tenure.cli.store import open_store
from tenure.core import rules
from tenure.recipes import ServiceRegistry
from tenure.shown import request_json


@click.group(cls=CommandGroup)
def service() -> None:
    """Register instances, and find them.

    Programs use tenure.recipes.ServiceRegistry. A service and a mutex must not share a name.
    """


@service.command()
@node_option
@click.option(
    "--recovery-window",
    "window",
    metavar="S",
    type=a_duration,
    default=DEFAULT_WINDOW,
    help="Seconds that it stays registered without contact to the store.  [default: 30]",
)
@url_option
@name_argument
@click.argument("endpoint")
@click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[-- COMMAND...]",
    shell_complete=complete("files"),
)
def register(name: str, endpoint: str, command: tuple[str, ...], node: str, window: float) -> int:
    """Register ENDPOINT as an instance of NAME.

    It is registered while COMMAND runs, which is ended when the registration is lost, as under
    'tenure run'. Without COMMAND it is registered until a signal.

    Exits with COMMAND's exit code, with 79 when the registration was lost, or with 128+n after
    signal n.
    """
    rules.check_window(window)
    data = endpoint.encode(errors="surrogateescape")
    if not command:
        return run_async(_stay(name, data, node, window))
    from tenure.cli.run.holder import Holder, Job

    check_executable(command[0])
    job = Job(
        kind="register",
        name=name,
        node=node,
        command=command,
        limit=None,
        count=1,
        data=data,
        timeout=None,
        window=window,
        grace=window / 4,
        quiet=False,
    )
    return run_async(Holder(job).run())


async def _stay(name: str, endpoint: bytes, node: str, window: float) -> int:
    """Stay registered until a signal or a loss."""
    from tenure.cli.run.holder import ADVICE, ENDING, on_signals

    task = asyncio.current_task()
    assert task is not None
    ended_by: list[int] = []

    def end(number: int) -> None:
        ended_by.append(number)
        task.cancel()

    on_signals(ENDING, end)
    try:
        async with (
            open_store(create=True) as client,
            client.session(
                node, recovery_window=window, description="tenure service register"
            ) as session,
            ServiceRegistry(session, name).register(endpoint),
        ):
            say(f"registered {shown_data(endpoint)} as {safe(name)} on {node}")
            sys.stdout.flush()
            await asyncio.Event().wait()  # a signal or the loss ends it
    except tenure.LeaseLost as loss:
        raise Mistake(Status.LOST, str(loss).removesuffix(ADVICE)) from None
    except asyncio.CancelledError:
        if not ended_by:
            raise
    return after_signal(ended_by[0])


@service.command("ls")
@name_argument
@click.option("--quiet", "-q", is_flag=True, help="Print only the endpoints, one per line.")
@node_option
@json_option
@url_option
def list_endpoints(name: str, node: str, *, quiet: bool, as_json: bool) -> None:
    """List the instances of NAME, in the order of their registration."""

    async def work() -> tenure.SemaphoreDescription | None:
        async with open_store() as client:
            there = await client.list_semaphores(node, owners=True)
            return next((each for each in there if each.name == name), None)

    described = run_async(work())
    owners = _instances(described, node)
    if as_json:
        instances = [request_json(each) for each in owners]
        print_json({"node": node, "name": name, "instances": instances})
    elif quiet:
        for each in owners:
            say(safe(each.data.decode(errors="surrogateescape")))
    elif owners:
        table(
            [
                Column("Endpoint", style="bold", text=True, keep=True),
                Column("Token", right=True),
                Column("Since", right=True),
                Column("Process", right=True),
                Column("Host", text=True),
                Column("Program", text=True),
                Column("Session", right=True),
            ],
            [_row(each) for each in owners],
        )
    else:
        say(f"no instance of {safe(name)} is registered on {node}")


def _instances(
    described: tenure.SemaphoreDescription | None, node: str
) -> tuple[tenure.RequestDescription, ...]:
    if described is None:
        return ()
    if not described.ephemeral:
        raise Mistake(
            Status.USAGE,
            f"{described.name!r} on {node} is a lasting semaphore, not a service; see 'tenure "
            f"describe {described.name}'",
        )
    return described.owners


def _row(each: tenure.RequestDescription) -> list[str]:
    return [
        shown_data(each.data),
        str(each.order_id),
        duration(each.since),
        "" if each.pid is None else str(each.pid),
        safe(each.host or ""),
        program(each),
        str(each.session_id),
    ]


@service.command()
@name_argument
@node_option
@watch_options("state")
@json_option
@url_option
def watch(name: str, node: str, limit: int | None, *, once: bool, as_json: bool) -> None:
    """Show the instances of NAME, and every change of them.

    Each state is one line; with --json, one object. Ends like 'tenure watch'.
    """

    def show(described: tenure.SemaphoreDescription) -> bool:
        owners = _instances(described, node)
        if as_json:
            instances = [request_json(each) for each in owners]
            print_json_line(
                {"time": time.time(), "node": node, "name": name, "instances": instances}
            )
        else:
            endpoints = "  ".join(shown_data(each.data) for each in owners)
            count = f"{len(owners)} registered{': ' if owners else ''}"
            say(f"{time.strftime('%H:%M:%S')}  {safe(name)}  {count}{endpoints}")
        return True

    run_async(show_states(name, node, show, 1 if once else limit))
