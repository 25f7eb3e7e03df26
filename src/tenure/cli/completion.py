"""Completion in a shell: `tenure completion SHELL`, and the candidates for each Tab.

Rules:

* A store has a fraction of a second to answer; after that, nothing is offered.
* Nothing is written to the store or the terminal: after an error, nothing is offered.
* Names that a shell would split or expand are not offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

import tenure
from tenure.cli.mistakes import Status
from tenure.cli.store import open_store

VARIABLE = "_TENURE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
TIMEOUT = 0.5
MOST = 200
"""Highest number of names that are offered."""

_HARMLESS = re.compile(r"[\w./:@%+,=-]+")


# \b stops click from rewrapping the paragraph.
HELP = """Print the completion script of a shell.

Put one of these into the file that your shell reads when it starts:

\b
eval "$(tenure completion bash)"              ~/.bashrc
eval "$(tenure completion zsh)"               ~/.zshrc
tenure completion fish | source               ~/.config/fish/config.fish

It completes commands, options, and the names of nodes, semaphores and mutexes that are in the
store at that moment.
"""


@click.command(help=HELP)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """`tenure completion`."""
    from click.shell_completion import ShellComplete

    whole = context.find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    # Not click's own version, which starts a bash to check its version.
    click.echo(ShellComplete.source(kind(whole, {}, "tenure", VARIABLE)), nl=False)


def answer(whole: click.Command, instruction: str) -> int:
    """Answer a completion script's request (in `VARIABLE`), and return the exit code."""
    logging.disable()
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            return shell_complete(whole, {}, "tenure", VARIABLE, instruction)
        except Exception:
            return Status.DONE  # an error message would disturb the prompt: nothing is offered


# Values of parameters


def names(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the semaphores on the node that the command line names."""
    node = context.params.get("node") or tenure.model.DEFAULT_NODE

    async def find(client: tenure.Client) -> Iterable[str]:
        return [each.name for each in await client.list_semaphores(node)]

    return _found(context, find, incomplete)


def nodes(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete the nodes."""

    async def find(client: tenure.Client) -> Iterable[str]:
        return await client.list_nodes()

    return _found(context, find, incomplete)


def files(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Complete files, as the shell does."""
    return [CompletionItem(incomplete, type="file")]


def _found(
    context: click.Context,
    find: Callable[[tenure.Client], Awaitable[Iterable[str]]],
    incomplete: str,
) -> list[CompletionItem[str]]:
    async def find_all() -> Iterable[str]:
        async with asyncio.timeout(TIMEOUT), open_store() as client:
            return await find(client)

    try:
        with context.scope(cleanup=False):
            found = asyncio.run(find_all())
    except Exception:
        return []  # no store, a broken one, a slow one: nothing is offered
    fitting = [each for each in found if each.startswith(incomplete) and _HARMLESS.fullmatch(each)]
    return [CompletionItem(each) for each in fitting[:MOST]]
