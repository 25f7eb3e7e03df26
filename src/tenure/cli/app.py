"""`tenure` itself: its commands, loaded on first use, and its handling of errors.

A mistake of the user is reported in one line on stderr that says what happened and what to do. A
traceback is shown only for a defect of tenure.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import ClassVar

import click
from click.shell_completion import CompletionItem

from tenure import TenureError, __version__
from tenure.cli.mistakes import Mistake, Status, after_signal, explain, table
from tenure.cli.options import url_option

SIGINT, SIGPIPE = 2, 13
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


class CommandGroup(click.Group):
    """A group of commands that shows its help when called alone, and detects typos."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without any, show the help."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the nearest name."""
        known = self.list_commands(ctx)
        name = args[0]
        if name in known or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "there are: " + ", ".join(known)
        raise click.UsageError(f"no such command {name!r}; {hint}", ctx)


class LazyGroup(CommandGroup):
    """The commands and their modules, so that the help of all commands imports none of them."""

    MODULES: ClassVar = {
        "run": ("tenure.cli.run.command", "run", "Run a command under a lock."),
        "ls": ("tenure.cli.look", "ls", "List semaphores with their holders and waiters."),
        "describe": ("tenure.cli.look", "describe", "Show the holders and waiters of NAME."),
        "why": ("tenure.cli.why", "why", "Show why the waiters of NAME wait."),
        "deadlocks": (
            "tenure.cli.why",
            "deadlocks",
            "List deadlocks: tasks that wait for each other.",
        ),
        "top": ("tenure.cli.top.command", "top", "Show holders and waiters, live."),
        "console": ("tenure.cli.console", "console", "Show the store in the browser, live."),
        "watch": ("tenure.cli.look", "watch", "Show each new state of NAME."),
        "node": ("tenure.cli.nodes", "node", "Manage nodes, the namespaces."),
        "sem": ("tenure.cli.semaphores", "sem", "Manage lasting semaphores."),
        "rate": ("tenure.cli.rates", "rate", "Take tokens of a rate limit."),
        "config": ("tenure.cli.config", "config", "Publish a value, and follow it."),
        "service": ("tenure.cli.service", "service", "Register instances, and find them."),
        "session": ("tenure.cli.admin", "session", "List and end sessions."),
        "evict": ("tenure.cli.admin", "evict", "Take one owner or waiter away from NAME."),
        "doctor": ("tenure.cli.doctor", "doctor", "Examine and test the store."),
        "backup": ("tenure.cli.backup", "backup", "Write a backup of the store into FILE."),
        "restore": ("tenure.cli.backup", "restore", "Make a store from the backup FILE."),
        "postgresql": (
            "tenure.cli.postgresql",
            "postgresql",
            "Create and upgrade the schema of a PostgreSQL store.",
        ),
        "serve": ("tenure.cli.serve", "serve", "Put a store on the network."),
        "token": ("tenure.cli.token", "token", "Make, list and revoke a server's tokens."),
        "dflockd": (
            "tenure.cli.dflockd",
            "dflockd",
            "Serve dflockd's clients, as a replacement of dflockd's server.",
        ),
        "demo": (
            "tenure.cli.demo.command",
            "demo",
            "Show processes that share locks and a leader.",
        ),
        "simulate": (
            "tenure.cli.simulate",
            "simulate",
            "Search for defects of tenure in simulated time.",
        ),
        "completion": (
            "tenure.cli.completion",
            "completion",
            "Print the completion script of a shell.",
        ),
        "man": ("tenure.cli.manual", "man", "Print the manual page."),
    }

    POSIX: ClassVar = frozenset({"run", "top", "service", "serve", "token", "dflockd", "demo"})
    """Commands that need processes, terminals or locks of Unix."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.MODULES)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.MODULES:
            return None
        if cmd_name in self.POSIX and sys.platform == "win32":
            raise Mistake(
                Status.USAGE,
                f"tenure {cmd_name} needs Linux or macOS; on Windows, use WSL. The library works, "
                "and so do ls, describe, watch, config, evict and doctor",
            )
        module, attribute, _ = self.MODULES[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        known = [
            CompletionItem(name, help=row[2])
            for name, row in self.MODULES.items()
            if name.startswith(incomplete)
        ]
        return known + click.Command.shell_complete(self, ctx, incomplete)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([("0", "done"), *table(run=False)])
        super().format_epilog(ctx, formatter)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, row[2]) for name, row in self.MODULES.items()])


# \b stops click from rewrapping the paragraph.
HELP = """Locks, semaphores and elections across processes and machines.

\b
tenure run --lock nightly -- ./backup.sh       one at a time, like flock(1)
tenure run --semaphore gpu --limit 4 -- ...    one of four slots
tenure run --elect primary -- ./scheduler      run while leader
tenure ls                                      holders and waiters
tenure demo                                    see it at work
"""


@click.group(
    cls=LazyGroup,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="The store is --url, else TENURE_URL, else an SQLite file of your own. "
    "'tenure COMMAND --help' has the details; 'tenure run --help' has its own exit codes.",
)
@click.version_option(__version__, "--version", prog_name="tenure", message="%(prog)s %(version)s")
@url_option
def tenure() -> None:
    """`tenure`: the group of all commands."""


def invoke(arguments: Sequence[str]) -> int:
    """Run a command line, and return the exit code."""
    logging.basicConfig(format="tenure: %(message)s", level=logging.WARNING)
    status: int = Status.DONE
    try:
        try:
            status = _invoke(list(arguments))
            if sys.stdout is not None:  # it was open when Python started
                sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output has closed the pipe (`tenure ls | head`).
            _output_is_lost()
            return after_signal(SIGPIPE)
        except OSError as error:
            if error.errno not in FULL or isinstance(error, TenureError):
                raise
            _output_is_lost()
            if status > after_signal(0):
                return status  # a closed terminal has ended the command, and nothing can be written
            click.echo(f"tenure: the output cannot be written: {error.strerror}", err=True)
            return Status.STORE
    except KeyboardInterrupt:
        return after_signal(SIGINT)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            traceback.print_exc()
            click.echo(f"tenure: a defect in tenure {__version__}: please report it", err=True)
            return Status.DEFECT
        status, message = explained
        if message:
            click.echo(f"tenure: {message}", err=True)
    return status


def _output_is_lost() -> None:
    """Python would flush again at exit, and print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _invoke(arguments: list[str]) -> int:
    try:
        with tenure.make_context("tenure", arguments) as context:
            return int(tenure.invoke(context) or Status.DONE)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
