"""A command's access to the store, and hints for names that are not found."""

from __future__ import annotations

import difflib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import click

import tenure
from tenure.cli.mistakes import Mistake, Status
from tenure.doctor import without_secrets


class NoStoreYet(Mistake):
    """Error: a read-only command was called before anything was stored."""


def chosen_url() -> str:
    """Return the URL of ``--url``, else of TENURE_URL, else of the user's own file."""
    given = given_url()
    url = tenure.default_url() if given is None else given
    if url.partition(":")[0].lower() == "memory":
        raise Mistake(
            Status.USAGE,
            f"{url} is the memory of one process, invisible to other commands; use sqlite:///FILE",
        )
    return url


def shown_url() -> str:
    """Return the chosen store for people: with an absolute path, and without secrets."""
    url = chosen_url()
    if _is_sqlite(url):
        from tenure.engines.sqlite.url import parse

        url = parse(url).url
    return without_secrets(url)


def _is_sqlite(url: str) -> bool:
    return url.partition(":")[0].lower() == "sqlite"


def given_url() -> str | None:
    """Return the value of ``--url``, if given."""
    url: str | None = click.get_current_context().find_root().obj
    return url


@asynccontextmanager
async def open_store(
    *, create: bool = False, lasting: bool = False
) -> AsyncIterator[tenure.Client]:
    """Return a client of the chosen store, whose "not found" errors suggest similar names.

    Args:
        create: whether to create a missing store file. Reading commands do not, so that a mistyped
            name creates nothing.
        lasting: whether the name is that of a lasting semaphore.

    Raises:
        NoStoreYet: the file is missing, and --url was not given.
    """
    url = chosen_url()
    if not create:
        check_there(url)
    async with tenure.connect(url) as client:
        try:
            yield client
        except (tenure.NodeNotFound, tenure.SemaphoreNotFound) as error:
            raise Mistake(Status.REFUSED, await _suggest(client, error, lasting)) from error


def warn_of_new_store() -> None:
    """Name the store that a command is about to create, if the user has named none."""
    if given_url() is not None or os.environ.get("TENURE_URL"):
        return
    try:
        check_there(chosen_url())
    except NoStoreYet:
        click.echo(
            f"tenure: no store was named, so this makes {shown_url()}, which this user of this "
            "host alone uses; to share locks, name one in TENURE_URL or after --url",
            err=True,
        )


def check_there(url: str) -> None:
    """Raise if the store is a file that does not exist.

    Raises:
        NoStoreYet: the file is missing, and --url was not given.
    """
    if not _is_sqlite(url):
        return
    from tenure.engines import split_client_parameters
    from tenure.engines.sqlite.url import parse

    file = parse(split_client_parameters(url)[0]).path
    try:
        os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        return  # the engine reports the mistake
    else:
        return
    message = f"there is no {file} yet; 'tenure run' makes it, or check --url and TENURE_URL"
    if given_url() is None:
        raise NoStoreYet(Status.STORE, message)
    raise Mistake(Status.STORE, message)


async def _suggest(
    client: tenure.Client, error: tenure.NodeNotFound | tenure.SemaphoreNotFound, lasting: bool
) -> str:
    """Return a message with similar names for a node or semaphore that is not found."""
    nodes = await client.list_nodes()
    node = error.node or tenure.model.DEFAULT_NODE
    if node not in nodes:
        near = did_you_mean(node, nodes)
        return f"there is no node {node}{near}; 'tenure node create {node}' creates it"
    names = {path: [each.name for each in await client.list_semaphores(path)] for path in nodes}
    others = [path for path, there in names.items() if error.name in there]
    if others:
        hint = f", but on {' and on '.join(others)} (--node)"
    else:
        hint = did_you_mean(error.name or "", names[node])
    there_is_none = f"there is no {error.name!r} on {node}{hint}"
    if lasting:
        return f"{there_is_none}; 'tenure sem create' creates it"
    return f"{there_is_none}; a mutex exists only while it has a holder or a waiter"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return names similar to a wrong one, as a question; empty without any."""
    near = difflib.get_close_matches(wrong, list(known), n=3)
    shown = " or ".join(each if each.startswith("/") else repr(each) for each in near)
    return f" (did you mean {shown}?)" if near else ""
