"""`tenure rate`: limits of a number per period, which programs and scripts share (`Rate`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

import tenure
from tenure.cli.app import CommandGroup
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.options import (
    a_count,
    a_duration,
    a_span,
    json_option,
    node_option,
    run_async,
    url_option,
)
from tenure.cli.output import duration, print_json, safe, say
from tenure.cli.store import open_store

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=CommandGroup)
def rate() -> None:
    """Take tokens of a rate limit.

    A rate grants at most N tokens in any period, over all programs and commands. Programs use
    Client.rate. All of them name the same limit and period.
    """


def _rate_options(command: F) -> F:
    """NAME, ``--limit``, ``--per`` and ``--burst``."""
    for decorate in (
        click.option("--burst", metavar="N", type=a_count, help="At once.  [default: the limit]"),
        click.option(
            "--per",
            metavar="TIME",
            type=a_span,
            required=True,
            help="The period: 60, 30s, 15m, 1h.",
        ),
        click.option(
            "--limit", metavar="N", type=a_count, required=True, help="Tokens in any period."
        ),
        click.argument("name"),
        node_option,
        url_option,
    ):
        command = decorate(command)
    return command


_count_option = click.option(
    "--count", metavar="N", type=a_count, default=1, help="Number of tokens.  [default: 1]"
)


@rate.command()
@_rate_options
@_count_option
@click.option("--wait", metavar="S", type=a_duration, help="Seconds to wait at most; 0 tries once.")
def take(
    name: str, node: str, limit: int, per: float, burst: int | None, count: int, wait: float | None
) -> None:
    """Take tokens of the rate NAME, and wait until they are granted.

    Exits with 75 if they are not free, with --wait 0, and with 76 if they would not be granted
    within --wait. Then nothing is taken, and the message says how long it would take.
    """

    async def work() -> None:
        async with open_store(create=True) as client:
            there = client.rate(name, limit=limit, per=per, burst=burst, path=node)
            await there.take(count, timeout=wait)

    try:
        run_async(work())
    except tenure.RateExceeded as error:
        if wait == 0:
            raise Mistake(Status.BUSY, str(error)) from error
        raise


@rate.command()
@_rate_options
@_count_option
@json_option
def peek(
    name: str,
    node: str,
    limit: int,
    per: float,
    burst: int | None,
    count: int,
    *,
    as_json: bool,
) -> None:
    """Show how many tokens of NAME are free, and how long --count tokens would take."""

    async def work() -> tenure.RateDescription:
        async with open_store() as client:
            there = client.rate(name, limit=limit, per=per, burst=burst, path=node)
            return await there.peek(count)

    found = run_async(work())
    if as_json:
        print_json(
            {
                "node": node,
                "name": name,
                "free": found.free,
                "wait": found.wait,
                "limit": found.limit,
                "per": found.per,
                "burst": found.burst,
            }
        )
        return
    when = f"{count} in {duration(found.wait)}" if found.wait else f"{count} now"
    say(f"{safe(name)}: {found.free} of {found.burst} free, {when}")


@rate.command()
@_rate_options
def resize(name: str, node: str, limit: int, per: float, burst: int | None) -> None:
    """Replace the limit and the period of the rate NAME, while it is in use.

    Programs with the former values get an error from then on.
    """

    async def work() -> None:
        async with open_store() as client:
            there = client.rate(name, limit=limit, per=per, burst=burst, path=node)
            await there.resize(limit=limit, per=per, burst=burst)

    run_async(work())
