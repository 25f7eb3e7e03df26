"""Options shared by several commands, and the runner of their asynchronous part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

from tenure.model import DEFAULT_NODE

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def a_duration(value: str) -> float:
    """Return the type of an option in seconds."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise click.BadParameter(f"{value!r} is not a number of seconds, zero or more")
    return number


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def a_span(value: str) -> float:
    """Return the type of an option in seconds or another unit: 90, 30s, 15m, 1h, 7d."""
    number, unit = (value[:-1], value[-1:]) if value[-1:] in _UNITS else (value, "s")
    try:
        return a_duration(number) * _UNITS[unit]
    except click.BadParameter:
        raise click.BadParameter(
            f"{value!r} is no length of time; write for example 30s, 15m, 1h or 7d"
        ) from None


def a_count(value: str) -> int:
    """Return the type of an option that is a count."""
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a whole number, one or more")
    return number


def _remember_url(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.find_root().obj = value


def complete(what: str) -> Callable[..., list[Any]]:
    """Return a completion of `tenure.cli.completion`, which is loaded only at a Tab."""

    def completed(*question: Any) -> list[Any]:
        from tenure.cli import completion

        offered: list[Any] = getattr(completion, what)(*question)
        return offered

    return completed


def name_argument(command: F) -> F:
    """NAME, of something that may exist."""
    return click.argument("name", shell_complete=complete("names"))(command)


def url_option(command: F) -> F:
    """``--url``, before or after the name of the command."""
    return click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_remember_url,
        help="The store, for example sqlite:///jobs.db.  [TENURE_URL]",
    )(command)


def json_option(command: F) -> F:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(command)


def node_option(command: F) -> F:
    """``--node``."""
    return click.option(
        "--node",
        metavar="PATH",
        default=DEFAULT_NODE,
        show_default=True,
        help="The node.",
        shell_complete=complete("nodes"),
    )(command)


def watch_options(item: str) -> Callable[[F], F]:
    """Options that end a watch: ``--count`` and ``--once``, for `limit` and `once`."""

    def decorate(command: F) -> F:
        command = click.option("--once", is_flag=True, help=f"Only the current {item}: --count 1.")(
            command
        )
        return click.option(
            "--count", "limit", metavar="N", type=a_count, help=f"End after N {item}s."
        )(command)

    return decorate


def data_options(command: F) -> F:
    """Add ``--data`` and ``--data-file``; `read_data` reads them."""
    command = click.option("--data", metavar="TEXT", help="The data, as text.")(command)
    return click.option(
        "--data-file",
        metavar="FILE",
        type=click.File("rb"),
        help="A file with the data, '-' for the standard input.",
    )(command)


def read_data(data: str | None, data_file: Any) -> bytes | None:
    """Return the bytes given with `data_options`, or ``None``."""
    if data is not None and data_file is not None:
        raise click.UsageError("give --data or --data-file, not both", click.get_current_context())
    if data is not None:
        return data.encode(errors="surrogateescape")
    return None if data_file is None else bytes(data_file.read())


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's asynchronous part."""
    return asyncio.run(work)
