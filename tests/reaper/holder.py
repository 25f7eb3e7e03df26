"""A program that holds a lock until it dies, as its arguments say: a URL, and what to do.

It prints its lines on stdout, and does the next thing when it gets a line on stdin.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import tenure
from tenure.reaper import program as reaper


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def told() -> str:
    """Wait for a line."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


async def main(url: str, name: str, window: float, *options: str) -> None:
    """Hold the lock."""
    if "impatient" in options:
        reaper.IDLE = 0.2
    client = tenure.connect(url)
    resumable = "resumable" in options
    session = await client.session(recovery_window=window, resumable=resumable)
    lease = await session.mutex(name).lock()
    leases = []
    say(f"holds {lease.fencing_token}")
    while True:
        match await told():
            case "settled":
                await asyncio.to_thread(reaper.settled)
                say("settled")
            case "kept":  # a child that prolongs the sessions, as the command of `tenure run`
                kept = await asyncio.to_thread(reaper.descriptor)
                assert kept is not None
                say(f"child {sleeping(kept)}")
            case "detach":
                await session.detach()
                say("detached")
            case "twice":  # two requests of one session for one name
                semaphore = session.semaphore("s", limit=2)
                leases = [await semaphore.acquire() for _ in range(2)]
                assert all(each.held for each in leases)
                await asyncio.to_thread(reaper.settled)
                say("holds s")
            case "again":
                other = tenure.connect(url)
                await other.mutex("b").lock()
                await asyncio.to_thread(reaper.settled)
                say("holds b")
            case "close":
                await client.aclose()
                say("closed")
            case what:
                DEEDS[what]()


def sleeping(kept: int) -> int:
    """Start a child with a descriptor, and return its id."""
    return subprocess.Popen(["sleep", "600"], pass_fds=[kept]).pid


def forked(child: Callable[[], object]) -> int:
    """Fork as a daemon does, with copies of all descriptors; return the child's id."""
    number = os.fork()  # noqa: TID251  it is what a daemon does
    if number == 0:
        child()
        os._exit(0)
    return number


def daemonize() -> None:
    """Leave a child that lives on."""
    say(f"child {forked(signal.pause)}")


def fork() -> None:
    """Fork a child, which ends."""
    say(f"forked {os.waitpid(forked(os.getpid), 0)[1]}")


def become_another() -> None:
    """Replace the program."""
    code = "print('new', flush=True); input()"
    os.execv(sys.executable, [sys.executable, "-c", code])


def wait() -> None:
    """Wait for any child."""
    try:
        os.wait()
    except ChildProcessError:
        say("no child")


DEEDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "term": lambda: signal.raise_signal(signal.SIGTERM),
    "fork": fork,
    "daemonize": daemonize,
    "exec": become_another,
    "wait": wait,
}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:]))
