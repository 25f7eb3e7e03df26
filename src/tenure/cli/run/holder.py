"""Holder of the lock: acquires it, runs the command under it, and releases it.

Rules:

* The lease is not entered, so its loss cancels nothing here. The thread that detects a loss kills
  the command before the session is closed.
* The guardian receives every proof, with a deadline shortly before the lease's, so that the command
  is dead when the session is closed at its deadline.
* The lock is released only after the guardian has reported the end.

Job control: effect of Ctrl-Z, `fg` and `bg` on a command in its own process group.

When the command is stopped from the keyboard, or because it may not use the terminal, `tenure run`
stops as well, so that the shell shows its prompt. The lease is not renewed then: a suspended job
loses its lock after the recovery window, and is killed. A command stopped by SIGSTOP was stopped on
purpose, and keeps its lock.

The terminal from which `tenure run` was started, if any, and its use by the job.

A command in its own process group may read the terminal only while that group is in the foreground.
The command gets the terminal from the start when all standard streams are the terminal. In a
pipeline (`tenure run ... | less`) another program may need it, so the command gets it on request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import click

import tenure
from tenure._client.client import client_core
from tenure.cli.look import describe_program, program
from tenure.cli.mistakes import Mistake, Status, after_signal
from tenure.cli.output import duration, safe
from tenure.cli.run.guard.cgroup import Cgroup, NoCgroup, end_abandoned, make, parent_of
from tenure.cli.run.guarded import (
    CannotGuard,
    CannotRun,
    CommandEnding,
    GuardedCommand,
    check_interpreter,
)
from tenure.cli.store import open_store
from tenure.core import refusals
from tenure.reaper import program as reaper

_Settings = list[int | list[bytes | int]]


class Terminal:
    """The controlling terminal of this process, if there is one."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._settings: _Settings | None = None
        with contextlib.suppress(OSError, termios.error):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            self._settings = termios.tcgetattr(self._fd)

    def close(self) -> None:
        """Close the terminal."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def exists(self) -> bool:
        """Return whether this process has a controlling terminal."""
        return self._fd is not None

    @property
    def is_ours(self) -> bool:
        """Return whether our process group is in the foreground."""
        return self._foreground() == os.getpgrp()

    def belongs_to(self, group: int) -> bool:
        """Return whether that process group is in the foreground."""
        return self._foreground() == group

    @property
    def alone(self) -> bool:
        """Return whether we are in the foreground, and all standard streams are terminals."""
        return self.is_ours and all(os.isatty(stream) for stream in range(3))

    def give(self, group: int) -> None:
        """Put a process group into the foreground."""
        if self._fd is not None:
            with contextlib.suppress(OSError), _unstopped():
                os.tcsetpgrp(self._fd, group)

    def take_back(self, group: int) -> bool:
        """Put ourselves into the foreground again if `group` is there; return true if it was."""
        if not self.belongs_to(group):
            return False
        self.give(os.getpgrp())
        return True

    def restore(self) -> None:
        """Undo changes to the terminal's settings by a killed command."""
        if self._fd is not None and self._settings is not None and self.is_ours:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def _foreground(self) -> int | None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                return os.tcgetpgrp(self._fd)
        return None


@contextlib.contextmanager
def _unstopped() -> Iterator[None]:
    """Block SIGTTOU, which stops a background process that changes the foreground group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


WANTS_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


class JobControl:
    """The command's place in the shell's job.

    Attributes:
        in_foreground: whether the command should have the terminal when the job has it.
        command: the command, once it is started.
    """

    command: GuardedCommand

    def __init__(self) -> None:
        self._terminal = Terminal()
        self.in_foreground = self._terminal.alone

    def stopped(self, number: int) -> None:
        """Handle a stop of the command by a signal."""
        group = self.command.group
        if number == signal.SIGSTOP or not self._terminal.exists or group is None:
            return
        if number in WANTS_TERMINAL:
            self.in_foreground = True
            # If `fg` has meanwhile given it the terminal, this report of the stop is outdated.
            if self._terminal.is_ours or self._terminal.belongs_to(group):
                self.continued()
                return
        self._terminal.take_back(group)
        self._suspend(number)
        # We have been continued, or could not be stopped: nothing would continue us. A command that
        # would only be stopped again stays stopped until a SIGCONT.
        if number not in WANTS_TERMINAL or self._terminal.is_ours:
            self.continued()

    def _suspend(self, number: int) -> None:
        """Stop the whole job, like a stop by the terminal."""
        loop = asyncio.get_running_loop()
        command = self.command
        handled = loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(0, number)
        if handled:
            loop.add_signal_handler(signal.SIGTSTP, command.signal, signal.SIGTSTP)

    def continued(self, _number: int = signal.SIGCONT) -> None:
        """Continue the command, perhaps in the foreground."""
        group = self.command.group
        if self.in_foreground and self._terminal.is_ours and group is not None:
            self._terminal.give(group)
        self.command.signal(signal.SIGCONT)

    def close(self) -> None:
        """Take the terminal back after the end of the command, with its settings restored."""
        group = self.command.group
        if group is not None and self._terminal.take_back(group):
            self._terminal.restore()
        self._terminal.close()


_CREDENTIALS = frozenset({"TENURE_TOKEN", "DFLOCKD_AUTH_TOKEN"})
"""Variables that consist of a credential."""

_SECRET = re.compile(r"password|passwd|secret|token(?![-_]?file)", re.IGNORECASE)
"""URL parameters that are secrets; those with names of files are not."""


def environment_of(
    lease: tenure.Lease, environment: Mapping[str, str], *, credentials: bool
) -> dict[str, str]:
    """Return the environment of a command that runs under a lease.

    Args:
        lease: the lease.
        environment: the environment of `tenure run`.
        credentials: whether to keep the credentials.
    """
    passed = dict(environment) if credentials else without_credentials(environment)
    passed |= {"TENURE_NAME": lease.name, "TENURE_NODE": lease.node}
    with contextlib.suppress(tenure.Unsupported):  # a store without an order of grants
        passed["TENURE_FENCING_TOKEN"] = str(lease.fencing_token)
    return passed


async def slots_of(lease: tenure.Lease) -> dict[str, str]:
    """Return the variable with the slots of a semaphore's lease, if its semaphore has slots."""
    try:
        return {"TENURE_SLOT": ",".join(map(str, await lease.slots()))}
    except (tenure.InvalidArgument, tenure.Unsupported):  # the limit is too high, or unknown
        return {}


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without tenure's tokens, and its URLs without secrets."""
    return {
        name: without_secrets(value) if name.startswith("TENURE_") else value
        for name, value in environment.items()
        if name not in _CREDENTIALS
    }


def without_secrets(value: str) -> str:
    """Return the URL of the same store, without user, password and tokens.

    Text that is not a URL with a host is returned unchanged.
    """
    scheme, mark, rest = value.partition("://")
    if not mark or scheme.startswith("sqlite"):
        return value
    place, query_mark, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    kept = [each for each in query.split("&") if each and not _is_secret(each)]
    query = query_mark + "&".join(kept) if kept else ""
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{query}"


def _is_secret(parameter: str) -> bool:
    return _SECRET.search(parameter.partition("=")[0]) is not None


FIRST = 1.0
"""Seconds of waiting before the first notice."""

INTERVAL = 5.0
"""Seconds between two reads of the queue after that."""


class Notices:
    """Lines for the user about a waiting request.

    Attributes:
        session: the session of the request, once attached.
    """

    def __init__(
        self, client: tenure.Client, name: str, node: str, say: Callable[[str], None]
    ) -> None:
        """Initialise; nothing is reported yet."""
        self.session: tenure.Session | None = None
        self._client = client
        self._name = name
        self._node = node
        self._say = say
        self._latest: object = self  # the line printed last, if any

    async def follow(self) -> NoReturn:
        """Print a line whenever the holder or the place has changed."""
        pause = FIRST
        while True:
            await asyncio.sleep(pause)
            pause = INTERVAL
            try:
                described = await self._client.describe_semaphore(self._name, self._node)
            except tenure.SemaphoreNotFound:
                continue  # it is being handed from one holder to the next
            except tenure.Unsupported:
                self._print(None, "")  # the store lists no holders
                continue
            except tenure.TenureError as error:
                self._print(type(error), f": {error}")
                continue
            place = self._place(described)
            about = ([owner.order_id for owner in described.owners], place)
            self._print(about, held_by(described) + place)

    def _place(self, described: tenure.SemaphoreDescription) -> str:
        session = None if self.session is None else self.session.id
        for at, waiter in enumerate(described.waiters, 1):
            if waiter.session_id == session:
                return f"; place {at} of {len(described.waiters)} in the queue"
        return ""

    def _print(self, about: object, text: str) -> None:
        if about != self._latest:
            self._latest = about
            self._say(f"waiting for {self._name!r} on {self._node}{text}")


def held_by(described: tenure.SemaphoreDescription) -> str:
    """Describe the holders, as the end of a message; empty when none is known."""
    if not described.owners:
        return ""
    first = described.owners[0]
    since = "" if first.since is None else f" for {duration(first.since)}"
    more = f" and {len(described.owners) - 1} more" if len(described.owners) > 1 else ""
    return f": held by {describe_program(first)}{since}{more}"


async def describe_holder(client: tenure.Client, name: str, node: str) -> tuple[str, str]:
    """Describe the holders and the number of waiters, if they can still be read."""
    try:
        described = await client.describe_semaphore(name, node)
    except tenure.TenureError:
        return "", ""
    if not described.owners:
        return "", ""
    return held_by(described), f", {len(described.waiters)} waiting"


def runner(last: tenure.LastRun) -> str:
    """Name the program that ran a job: ``tenure run backup.sh, pid 4242 on db-1``."""
    process = "" if last.pid is None else f"pid {last.pid}"
    name = ", ".join(filter(None, (program(last), process))) or "an unknown program"
    return f"{name} on {safe(last.host)}" if last.host else name


LEAD = 0.05
"""Seconds between the death of the command and the deadline of the lease."""

ADVICE = "; stop what it protects: another program may hold it already"
"""Advice in the error of a loss, removed here because the command has been ended."""

ENDING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that end a `tenure run` that still waits. A running command gets them instead."""


@dataclass(frozen=True, slots=True)
class Job:
    """Parsed options of `tenure run` or `tenure service register`."""

    kind: Literal["lock", "semaphore", "elect", "register"]
    name: str
    node: str
    command: Sequence[str]
    limit: int | None
    count: int
    data: bytes
    timeout: float | None
    window: float
    grace: float
    quiet: bool
    verbose: bool = False
    credentials: bool = False  # whether the command gets the credentials of `tenure run`
    once_per: float | None = None
    count_failed: bool = False
    hold_at_least: float = 0.0
    cgroup: bool = True  # whether the command gets its own cgroup, where possible


class Holder:
    """One `tenure run`, from start to exit code."""

    def __init__(self, job: Job) -> None:
        """Store the job; nothing is acquired or started."""
        self._job = job
        self._command: GuardedCommand | None = None
        self._session: tenure.Session | None = None
        self._cgroup: Cgroup | None = None
        self._interrupted_by: int | None = None

    async def run(self) -> int:
        """Run, and return the exit code."""
        task = asyncio.current_task()
        assert task is not None

        def interrupt(number: int) -> None:
            self._interrupted_by = number
            task.cancel()

        on_signals(ENDING, interrupt)
        code: int | None = None
        self._contain()
        try:
            async with open_store(create=True) as client:
                code = await self._with_client(client)
        except asyncio.CancelledError:
            if self._interrupted_by is None:
                raise
            return after_signal(self._interrupted_by)
        except tenure.TenureError as error:
            if code is None:
                raise
            # The end of this process releases all. The command has run, so its exit code is
            # returned.
            say(str(error))
        finally:
            if self._cgroup is not None:
                self._cgroup.remove()
                self._cgroup.close()
        return code

    def _contain(self) -> None:
        """Create a cgroup for the command, and end processes left in abandoned cgroups."""
        try:
            check_interpreter()
        except CannotGuard as failure:
            raise self._not_guarded(failure) from None
        try:
            parent = parent_of()
            for name in end_abandoned(parent):
                self._report(f"ended the processes of a killed 'tenure run' ({name})")
            if not self._job.cgroup:
                raise NoCgroup("--no-cgroup")
            self._cgroup = make(parent)
        except NoCgroup as reason:
            self._apart(str(reason))
        else:
            self._report(
                f"the command runs in its own cgroup, {self._cgroup.path}: all of its processes "
                "end with the lock"
            )

    def _apart(self, reason: str) -> None:
        self._report(
            f"no cgroup for the command ({reason}): its descendants are ended one by one. Were "
            "'tenure run' and both of its guards killed at once, they would survive"
        )

    def _report(self, text: str) -> None:
        if self._job.verbose:
            say(text)

    def _not_guarded(self, failure: CannotGuard) -> Mistake:
        return Mistake(
            Status.NOT_EXECUTABLE,
            f"{self._job.command[0]} cannot be guarded, and was not run: {failure}. Run tenure "
            "with an installed Python.",
        )

    async def _with_client(self, client: tenure.Client) -> int:
        job = self._job
        lease = await self._acquire(client)
        started = client.clock.now()
        try:
            ending = await self._run_under(lease, await _liveness(client))
        except CannotRun as failure:
            status = Status.NOT_FOUND if failure.errno == errno.ENOENT else Status.NOT_EXECUTABLE
            raise Mistake(status, f"{job.command[0]}: {failure}") from None
        except CannotGuard as failure:
            raise self._not_guarded(failure) from None
        if ending.lost and lease.loss is None:
            say(
                f"the lease of {lease.name!r} on {lease.node} could not be proven in time; "
                "the command was ended before it could expire"
            )
            return Status.LOST
        try:
            if isinstance(lease, tenure.RunLease) and ending.exit_code == 0:
                await lease.succeed()
            await _hold(lease, started + job.hold_at_least - client.clock.now())
            await lease.release()
        except tenure.LeaseLost as loss:
            how = "was ended" if ending.lost else "had ended by itself"
            say(f"{str(loss).removesuffix(ADVICE)}; the command {how}")
            return Status.LOST
        return ending.exit_code

    # The lock

    async def _acquire(self, client: tenure.Client) -> tenure.Lease:
        job = self._job
        notices = Notices(client, job.name, job.node, say)
        person = job.verbose or (not job.quiet and sys.stderr.isatty())
        notice = asyncio.create_task(notices.follow()) if person else None
        now = client.clock.now
        started_at = now()
        until = None if job.timeout is None else now() + job.timeout
        timeout = job.timeout
        try:
            while True:
                session = await client.session(
                    job.node, recovery_window=job.window, description=_description(job)
                )
                self._session = notices.session = session  # kept until the client is closed
                try:
                    lease = await self._request(session, timeout)
                    self._report(
                        f"acquired {job.name!r} on {job.node} after {duration(now() - started_at)}"
                    )
                    return lease
                except tenure.SessionExpired as expired:
                    # We were stopped, or suspended. Nothing was held yet, so queue again.
                    say(f"{expired}; queueing again")
                    if until is not None:
                        timeout = max(0.0, until - now())
        except tenure.AcquireTimeout as late:
            if late.__cause__ is not None:
                raise  # the store is the reason, not another holder
            busy = job.timeout == 0
            waited = "" if busy else f" after {duration(job.timeout)}"
            held, waiting = await describe_holder(client, job.name, job.node)
            raise Mistake(
                Status.BUSY if busy else Status.TIMED_OUT,
                ""
                if job.quiet
                else f"{job.name!r} on {job.node} is not free{waited}{held}{waiting}",
            ) from None
        finally:
            if notice is not None:
                notice.cancel()
                await asyncio.wait([notice])

    async def _request(self, session: tenure.Session, timeout: float | None) -> tenure.Lease:
        job = self._job
        if job.once_per is not None:
            return await self._once(session, job.once_per, timeout)
        if job.kind == "lock":
            return await session.mutex(job.name).lock(
                data=job.data, timeout=timeout, on_loss=self._lost
            )
        if job.kind == "elect":
            return await session.election(job.name).campaign(
                job.data, timeout=timeout, on_loss=self._lost
            )
        if job.kind == "register":
            from tenure.recipes import ServiceRegistry  # `tenure run` continues without it

            registry = ServiceRegistry(session, job.name)
            return await registry.register(job.data, on_loss=self._lost)
        semaphore = session.semaphore(job.name)
        try:
            if job.limit is not None:
                await semaphore.create(job.limit, exist_ok=True)
            return await semaphore.acquire(
                job.count, data=job.data, timeout=timeout, on_loss=self._lost
            )
        except tenure.SemaphoreExists as error:
            assert job.limit is not None
            raise Mistake(
                Status.USAGE,
                f"{job.name!r} on {job.node} has the limit {error.limit}, not {job.limit}; give "
                "that one, or another name, or change it: "
                f"'{refusals.resizing(job.node, job.name, job.limit)}'",
            ) from None
        except tenure.SemaphoreNotFound:
            raise Mistake(
                Status.REFUSED,
                f"there is no semaphore {job.name!r} on {job.node}; --limit N creates it",
            ) from None

    async def _once(
        self, session: tenure.Session, per: float, timeout: float | None
    ) -> tenure.RunLease:
        job = self._job
        lease = await session.once(
            job.name,
            per=per,
            timeout=timeout,
            count_failed=job.count_failed,
            data=job.data,
            on_loss=self._lost,
        )
        if lease is not None:
            return lease
        last = await session.last_run(job.name)
        if last is None or last.since >= per or not (last.succeeded or job.count_failed):
            raise tenure.AcquireTimeout("another run is not finished", node=job.node, name=job.name)
        raise Mistake(
            Status.NOT_DUE,
            ""
            if job.quiet
            else f"{job.name!r} on {job.node} is not due for {duration(per - last.since)}: it ran "
            f"{duration(last.since)} ago ({runner(last)})",
        )

    def _lost(self, _loss: tenure.LeaseLost) -> None:
        """Handle the loss of the lease. From any thread."""
        if self._command is not None:
            self._command.kill()

    # The command

    async def _run_under(self, lease: tenure.Lease, inherit: int | None) -> CommandEnding:
        job = self._job
        environment = environment_of(lease, os.environ, credentials=job.credentials)
        if job.kind == "semaphore":
            environment |= await slots_of(lease)
        control = JobControl()
        self._command = command = GuardedCommand.start(
            job.command,
            environment,
            deadline=lease.deadline - LEAD,
            grace=job.grace,
            foreground=control.in_foreground,
            inherit=inherit,
            cgroup=self._cgroup,
            stopped=control.stopped,
            stuck=lambda pids: say(f"SIGKILL has not ended these processes yet: {pids}"),
            apart=self._apart,
        )
        control.command = command
        try:
            on_signals((*ENDING, signal.SIGWINCH), command.signal)
            on_signals((signal.SIGTSTP,), command.signal)
            on_signals((signal.SIGCONT,), control.continued)
            if not lease.held:
                command.kill()
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(1.0, job.window / 20)):
                        return await command.ended()
                if lease.held:
                    command.extend(lease.deadline - LEAD)
        finally:
            await command.aclose()
            control.close()


def on_signals(numbers: Iterable[signal.Signals], act: Callable[[int], None]) -> None:
    """Call `act` on signals, except those that our caller ignores (nohup)."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, act, number)


def say(text: str) -> None:
    """Print a line for the user."""
    click.echo(f"tenure: {text}", err=True)


async def _liveness(client: tenure.Client) -> int | None:
    """Return a descriptor whose copies in the command prolong the session's life, if any.

    The command may outlive this process for a moment, until its guardian has ended it.
    """
    own = client_core(client).engine.liveness_fd()
    return await asyncio.to_thread(reaper.descriptor) if own is None else own


async def _hold(lease: tenure.Lease, seconds: float) -> None:
    """Keep the lease for a while, until it is lost or a signal arrives."""
    if seconds <= 0:
        return
    interrupted = asyncio.Event()
    on_signals(ENDING, lambda _: interrupted.set())
    waits = [asyncio.ensure_future(each) for each in (lease.wait_lost(), interrupted.wait())]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
        await asyncio.wait(waits)


def _description(job: Job) -> str:
    """Return the description of our session, without arguments, which may be secret."""
    program = Path(job.command[0]).name
    return f"tenure run {program}"[:250]
