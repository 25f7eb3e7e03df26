"""`tenure sem`: lasting semaphores, which are created before use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import click

import tenure
from tenure.cli.app import CommandGroup
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import (
    a_count,
    data_options,
    name_argument,
    node_option,
    read_data,
    run_async,
    url_option,
)
from tenure.cli.store import open_store


@click.group(cls=CommandGroup)
def sem() -> None:
    """Manage lasting semaphores.

    Mutexes need no management: they exist while they have a holder or a waiter.
    """


@asynccontextmanager
async def _semaphore(
    name: str, node: str, *, create: bool = False
) -> AsyncIterator[tenure.Semaphore]:
    async with (
        open_store(create=create, lasting=True) as client,
        client.session(node, description="tenure sem") as session,
    ):
        yield session.semaphore(name)


@sem.command()
@click.argument("name")
@click.option("--limit", type=a_count, required=True, metavar="N", help="Number of tokens.")
@click.option("--exist-ok", is_flag=True, help="Accept an existing semaphore of the same limit.")
@data_options
@node_option
@url_option
def create(
    name: str, node: str, limit: int, data: str | None, data_file: Any, *, exist_ok: bool
) -> None:
    """Create the semaphore NAME."""
    content = read_data(data, data_file) or b""

    async def work() -> None:
        async with _semaphore(name, node, create=True) as semaphore:
            await semaphore.create(limit, content, exist_ok=exist_ok)

    run_async(work())


@sem.command()
@name_argument
@data_options
@node_option
@url_option
def update(name: str, node: str, data: str | None, data_file: Any) -> None:
    """Replace the data of the semaphore NAME; its watchers are notified."""
    content = read_data(data, data_file)
    if content is None:
        raise Mistake(Status.USAGE, "the data is missing: give --data TEXT or --data-file FILE")

    async def work() -> None:
        async with _semaphore(name, node) as semaphore:
            await semaphore.update(content)

    run_async(work())


@sem.command()
@name_argument
@click.argument("limit", type=a_count)
@node_option
@url_option
def resize(name: str, node: str, limit: int) -> None:
    """Change the limit of the semaphore NAME to LIMIT, while it is in use.

    A higher limit grants at once. A lower one takes no lease away: nothing is granted until enough
    is released. A waiter for more than LIMIT gets an error.
    """

    async def work() -> None:
        async with _semaphore(name, node) as semaphore:
            await semaphore.resize(limit)

    run_async(work())


@sem.command()
@name_argument
@click.option("--force", is_flag=True, help="Delete it even with owners or waiters.")
@node_option
@url_option
def delete(name: str, node: str, *, force: bool) -> None:
    """Delete the semaphore NAME."""

    async def work() -> None:
        async with _semaphore(name, node) as semaphore:
            await semaphore.delete(force=force)

    run_async(work())
