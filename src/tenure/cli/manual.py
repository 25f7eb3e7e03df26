"""`tenure man`: the manual page tenure(1), generated from the help texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import cleandoc

import click

from tenure import __version__
from tenure.cli.mistakes import table

ENVIRONMENT = (
    ("TENURE_URL", "The store, unless --url names another."),
    ("XDG_STATE_HOME", "Folder of the default store, tenure/tenure.db; else ~/.local/state."),
    (
        "TENURE_NAME, TENURE_NODE, TENURE_FENCING_TOKEN, TENURE_SLOT",
        (
            "Set for a command under a lock: its name, its node, a number that rises with grants, "
            "and with --semaphore a number that no other holder has."
        ),
    ),
)


@click.command()
def man() -> None:
    """Print the manual page.

    To read it: tenure man | man -l -
    """
    from tenure.cli.app import tenure as whole

    click.echo(manual_page(whole), nl=False)


def manual_page(whole: click.Group) -> str:
    """tenure(1) in the man(7) language."""
    return "\n".join(_lines(whole)) + "\n"


def _lines(whole: click.Group) -> Iterator[str]:
    context = click.Context(whole, info_name="tenure")
    yield f'.TH TENURE 1 "" "tenure {__version__}" "User Commands"'
    yield ".SH NAME"
    yield _text("tenure - locks, semaphores and elections across processes and machines")
    yield ".SH SYNOPSIS"
    yield r".B tenure"
    yield _text("[OPTIONS] COMMAND [ARGS]...")
    yield ".SH DESCRIPTION"
    yield from _paragraphs(whole.help or "")
    yield from _options(whole, context)
    yield ".SH COMMANDS"
    yield from _commands(whole, context)
    yield ".SH EXIT STATUS"
    yield from _definitions([("0", "done"), *table()])
    yield ".PP"
    yield _text("The exit code of a command under 'tenure run' is passed on.")
    yield ".SH ENVIRONMENT"
    yield from _definitions(ENVIRONMENT)
    yield ".SH SEE ALSO"
    yield ".BR flock (1)"


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(inner))
        yield f".SS {_text(inner.command_path + ' ' + usage)}"
        yield from _paragraphs(command.help or "")
        yield from _options(command, inner)
        yield from _paragraphs(command.epilog or "")
        if isinstance(command, click.Group):
            yield from _commands(command, inner)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    rows = [each.get_help_record(context) for each in command.get_params(context)]
    yield from _definitions(row for row in rows if row is not None and "--help" not in row[0])


def _definitions(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, meaning in rows:
        yield ".TP"
        yield f".B {_text(term)}"
        yield _text(meaning or "-")


def _paragraphs(text: str) -> Iterator[str]:
    """Help as click has it: paragraphs, of which those after a backspace are not rewrapped."""
    for paragraph in cleandoc(text).split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].strip() == "\b":
            yield from (".PP", ".nf", *map(_text, lines[1:]), ".fi")
        elif any(lines):
            yield ".PP"
            yield _text(" ".join(line.strip() for line in lines))


def _text(text: str) -> str:
    """Return a line of text, escaped so that it contains no commands."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    return "\\&" + escaped if escaped[:1] in {".", "'"} else escaped
