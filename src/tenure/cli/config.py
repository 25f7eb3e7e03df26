"""`tenure config`: one value that programs and scripts publish and follow (`SharedConfig`).

A value is bytes, printed unchanged into a pipe, and escaped on a terminal. Reading and watching
create nothing, so a mistyped name leaves nothing behind.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, BinaryIO

import click

import tenure
from tenure.cli.app import CommandGroup
from tenure.cli.look import show_states
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import (
    json_option,
    name_argument,
    node_option,
    run_async,
    url_option,
    watch_options,
)
from tenure.cli.output import data_json, is_terminal, print_json_line, safe, say
from tenure.cli.store import did_you_mean, open_store
from tenure.recipes import SharedConfig, json_codec


class _Raw:
    """Bytes, unchanged."""

    def encode(self, value: bytes, /) -> bytes:
        return value

    def decode(self, data: bytes, /) -> bytes:
        return data


@click.group(cls=CommandGroup)
def config() -> None:
    """Publish a value, and follow it.

    Programs use tenure.recipes.SharedConfig, whose values are JSON by default.
    """


@config.command()
@name_argument
@node_option
@url_option
def get(name: str, node: str) -> None:
    """Print the value of NAME.

    The bytes are unchanged in a pipe, and escaped on a terminal. Exits with 73 when nothing has
    been published.
    """

    async def work() -> bytes | None:
        async with open_store() as client, client.session(node, description="tenure config") as at:
            value = await SharedConfig(at, name, codec=_Raw()).get()
            if value is None:
                await _refuse(client, node, name)
            return value

    value = run_async(work())
    assert value is not None
    if is_terminal():
        for line in value.decode(errors="surrogateescape").splitlines():
            say(safe(line))
    else:
        click.echo(value, nl=False)


async def _refuse(client: tenure.Client, node: str, name: str) -> None:
    known = [
        each.name
        for each in await client.list_semaphores(node)
        if not each.ephemeral and each.limit == 1 and each.data
    ]
    raise Mistake(
        Status.REFUSED,
        f"nothing has been published as {name!r} on {node}{did_you_mean(name, known)}",
    )


@config.command("set")
@name_argument
@click.argument("value", required=False, metavar="[VALUE|-]")
@click.option("--file", metavar="FILE", type=click.File("rb"), help="A file with the value.")
@click.option("--json", "as_json", is_flag=True, help="The value must be JSON.")
@node_option
@url_option
def set_value(
    name: str, value: str | None, file: BinaryIO | None, node: str, *, as_json: bool
) -> None:
    """Publish a value as NAME; its watchers are notified.

    VALUE is the value itself, or '-' for the standard input. With --json it is checked, and encoded
    as by tenure.recipes.SharedConfig, so that equal values have equal bytes and wake no watcher.
    """
    data = _given(value, file)
    if as_json:
        data = _as_json(data)

    async def work() -> None:
        async with (
            open_store(create=True) as client,
            client.session(node, description="tenure config") as session,
        ):
            await SharedConfig(session, name, codec=_Raw()).set(data)

    run_async(work())


def _given(value: str | None, file: BinaryIO | None) -> bytes:
    if (value is None) == (file is None):
        raise click.UsageError(
            "give one of VALUE, '-' and --file FILE", click.get_current_context()
        )
    if file is not None:
        return file.read()
    assert value is not None
    if value == "-":
        return sys.stdin.buffer.read()
    return value.encode(errors="surrogateescape")


def _as_json(data: bytes) -> bytes:
    try:
        return json_codec.encode(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise Mistake(Status.USAGE, f"the value is not JSON: {error}") from None


@config.command()
@name_argument
@node_option
@watch_options("value")
@json_option
@url_option
def watch(name: str, node: str, limit: int | None, *, once: bool, as_json: bool) -> None:
    """Show the value of NAME, and every newer one.

    Each is one line, escaped, with the time; with --json, one object, whose data is null when
    nothing has been published. Ends like 'tenure watch'.
    """
    latest: bytes | None = None

    def show(described: tenure.SemaphoreDescription) -> bool:
        nonlocal latest
        if not described.ephemeral and described.limit != 1:
            raise Mistake(
                Status.USAGE,
                f"{name!r} on {node} is a semaphore of limit {described.limit}, and a "
                "configuration is one of limit 1",
            )
        if described.data == latest:
            return False  # only its owners have changed
        latest = described.data
        _show(name, node, latest, as_json=as_json)
        return True

    run_async(show_states(name, node, show, 1 if once else limit))


def _show(name: str, node: str, data: bytes, *, as_json: bool) -> None:
    if as_json:
        described: dict[str, Any] = {"time": time.time(), "node": node, "name": name}
        nothing = {"data": None, "data_base64": None}
        print_json_line(described | {"exists": bool(data)} | (data_json(data) if data else nothing))
    else:
        text = safe(data.decode(errors="surrogateescape")) if data else "(nothing published)"
        say(f"{time.strftime('%H:%M:%S')}  {text}")
    sys.stdout.flush()
