"""Command `tenure run`: its options, and the checks before the wait."""

from __future__ import annotations

import os
import shutil
from typing import Any, Literal

import click

from tenure.cli.mistakes import Mistake, Status, table
from tenure.cli.options import (
    a_count,
    a_duration,
    a_span,
    complete,
    node_option,
    run_async,
    url_option,
)
from tenure.cli.store import warn_of_new_store
from tenure.core import rules

DEFAULT_WINDOW = 30.0


class _WithStatusTable(click.Command):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([("0-255", "the command's own, passed on"), *table(others=False)])
        super().format_epilog(ctx, formatter)


@click.command(
    cls=_WithStatusTable,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    epilog="When the lease can no longer be proven, the command gets SIGTERM --grace before the "
    "deadline, and SIGKILL at the deadline, with all its descendants. Daemons (setsid, and no "
    "parent left) end with a lost lock, but survive when the command ends by itself. Work "
    "that it has started in a database, a container or on another host continues: have those "
    "compare TENURE_FENCING_TOKEN.",
)
@click.option(
    "--lock",
    metavar="NAME",
    shell_complete=complete("names"),
    help="One holder at a time: a mutex.",
)
@click.option(
    "--semaphore",
    metavar="NAME",
    shell_complete=complete("names"),
    help="At most --limit holders at a time.",
)
@click.option(
    "--elect",
    metavar="NAME",
    shell_complete=complete("names"),
    help="One leader at a time, seen by observers.",
)
@click.option(
    "--limit",
    metavar="N",
    type=a_count,
    help="The semaphore's limit; creates it when missing.",
)
@click.option(
    "--count",
    metavar="K",
    type=a_count,
    help="Number of the semaphore's tokens to take.  [default: 1]",
)
@click.option(
    "--once-per",
    metavar="TIME",
    type=a_span,
    help="With --lock: do not run it when a run was started less than TIME ago (30s, 15m, 1h, 1d) "
    "and succeeded, by the store's clock.",
)
@click.option(
    "--count-failed",
    is_flag=True,
    help="With --once-per: failed and killed runs count, too.",
)
@click.option(
    "--hold-at-least",
    metavar="TIME",
    type=a_span,
    default="0",
    help="Keep the lock for TIME from the start of COMMAND, even when that ends sooner.",
)
@node_option
@click.option(
    "--timeout",
    metavar="S",
    type=a_duration,
    help="Seconds to wait; 0 tries once.  [default: for ever]",
)
@click.option(
    "--recovery-window",
    "window",
    metavar="S",
    type=a_duration,
    default=DEFAULT_WINDOW,
    help="Seconds that the lock survives without contact to the store, and that waiters wait for "
    "a holder which is cut off; 1 to 1800.  [default: 30]",
)
@click.option(
    "--grace",
    metavar="S",
    type=a_duration,
    help="Seconds from SIGTERM to SIGKILL when the lock is being lost; under half the window.  "
    "[default: a quarter of it]",
)
@click.option("--data", metavar="TEXT", default="", help="Data that other clients see.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing when it is not free.")
@click.option(
    "--verbose",
    "-v",
    is_flag=True,
    help="Print the awaited holders (default on a terminal), and the command's containment.",
)
@click.option(
    "--pass-credentials",
    "credentials",
    is_flag=True,
    help="Keep TENURE_TOKEN, and the passwords in TENURE_URL, in COMMAND's environment.",
)
@click.option(
    "--no-cgroup",
    "cgroup",
    flag_value=False,
    default=True,
    help="Do not put COMMAND into its own cgroup.",
)
@url_option
@click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- COMMAND...",
    shell_complete=complete("files"),
)
def run(
    lock: str | None,
    semaphore: str | None,
    elect: str | None,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Run a command under a lock.

    Like flock(1), across processes and machines: waits for the lock, runs COMMAND, and releases it.

    COMMAND runs in its own process group, with TENURE_NAME, TENURE_NODE and TENURE_FENCING_TOKEN in
    its environment. It gets the signals that 'tenure run' gets, and never outlives the lock. When
    it ends, its remaining background processes are ended.
    """
    from tenure.cli.run.holder import Holder, Job

    kind, name = _what(lock=lock, semaphore=semaphore, elect=elect)
    job = Job(kind=kind, name=name, command=command, **_checked(kind, options))
    check_executable(command[0])
    warn_of_new_store()
    return run_async(Holder(job).run())


def _what(**given: str | None) -> tuple[Literal["lock", "semaphore", "elect"], str]:
    context = click.get_current_context()
    chosen = [(kind, name) for kind, name in given.items() if name is not None]
    if len(chosen) != 1:
        raise click.UsageError("give one of --lock, --semaphore and --elect", context)
    ((kind, name),) = chosen
    assert kind in {"lock", "semaphore", "elect"}
    return kind, name  # type: ignore[return-value]  # just checked


def _checked(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that belong together and were given."""
    context = click.get_current_context()
    rules.check_window(options["window"])
    window, grace, limit = options["window"], options["grace"], options["limit"]
    if kind != "semaphore" and (limit is not None or options["count"] is not None):
        raise click.UsageError("--limit and --count go with --semaphore", context)
    if options["once_per"] is not None and kind != "lock":
        raise click.UsageError("--once-per goes with --lock", context)
    if options["count_failed"] and options["once_per"] is None:
        raise click.UsageError("--count-failed goes with --once-per", context)
    count = options["count"] or 1
    if limit is not None and count > limit:
        raise click.UsageError(f"--count {count} is more than --limit {limit}", context)
    if grace is None:
        grace = window / 4
    if grace >= window / 2:
        raise click.UsageError(
            f"--grace is under half of the recovery window ({window:g} s), not {grace:g} s; "
            "choose a longer --recovery-window",
            context,
        )
    data = options["data"].encode(errors="surrogateescape")
    return options | {"count": count, "grace": grace, "data": data}


def check_executable(program: str) -> None:
    """Report a missing command now, and not when the lock is granted."""
    if shutil.which(program) is not None:
        return
    if "/" in program and os.path.exists(program):
        raise Mistake(
            Status.NOT_EXECUTABLE,
            f"{program} cannot be executed; is it a script "
            "without permission (chmod +x), or a folder?",
        )
    raise Mistake(Status.NOT_FOUND, f"there is no command {program!r}")
