"""A program that holds a lock until it dies, as its arguments say: a URL, and what to do.

It prints its lines on stdout, and does the next thing when it gets a line on stdin.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import tenure


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


async def told() -> str:
    """Wait for a line."""
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


async def main(url: str) -> None:
    """Hold the lock."""
    client = tenure.connect(url)
    session = await client.session(recovery_window=30)
    lease = await session.mutex("a").lock()
    say(f"holds {lease.fencing_token}")
    while True:
        match await told():
            case "exit":
                os._exit(3)
            case "abort":
                os.abort()
            case "term":
                signal.raise_signal(signal.SIGTERM)
            case "fork":  # as a daemon does: the parent lives on, the child ends
                child = os.fork()
                if child == 0:
                    os._exit(0)
                say(f"forked {os.waitpid(child, 0)[1]}")
            case "daemon":  # a child that lives on, with copies of all descriptors
                child = os.fork()
                if child == 0:
                    os.setsid()
                    signal.pause()
                say(f"child {child}")
            case "exec":
                os.execv(sys.executable, [sys.executable, "-c", "print('new', flush=True); input()"])
            case "wait":
                try:
                    os.wait()
                except ChildProcessError:
                    say("no child")
            case "spawn":
                with subprocess.Popen(["sleep", "0"]):
                    pass
                say("spawned")
            case "detach":
                await session.detach()
                say("detached")
            case "close":
                await client.aclose()
                say("closed")
            case _:
                return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
