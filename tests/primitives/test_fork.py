"""A forked child that touches its parent's client is told so, and disturbs nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest

from tenure import fork
from tenure.errors import Misuse
from tests.guarantees import MEMORY, guarantee
from tests.primitives.helpers import World

PROGRAM = """
    import asyncio, gc, os, sys, threading, traceback, warnings
    import tenure

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of a fork among threads

    def expect_misuse(what, call):
        try:
            call()
        except tenure.Misuse as error:
            assert "belongs to the parent of this forked process" in str(error), error
            assert "connect again in the child" in str(error), error
        else:
            raise AssertionError(f"{what} did not raise")

    def drive(awaitable):
        "Without a loop: what is misused says so before it waits for anything."
        if hasattr(awaitable, "__await__"):
            return next(iter(awaitable.__await__()))

    async def main():
        # Waiting for the child blocks the loop, which asyncio's debug mode would remark on.
        asyncio.get_running_loop().slow_callback_duration = 600
        client = tenure.connect("memory://")
        async with client, client.session() as session:
            await session.semaphore("s").create(2)
            states = session.semaphore("s").watch(data=True)
            await anext(states)
            ticket = await session.semaphore("s").enqueue()
            async with session.mutex("m").lock() as lease:
                pid = os.fork()
                if pid == 0:
                    in_the_child(locals())
                _, status = os.waitpid(pid, 0)
                assert os.waitstatus_to_exitcode(status) == expected, status
                await asyncio.sleep(0.2)
                assert lease.held and session.state == "attached"
                async with session.mutex("after").lock():
                    pass
            await ticket.withdraw()
            await states.aclose()
        print("the parent is well")
"""


def run(child: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
    program = (
        textwrap.dedent(PROGRAM)
        + f"\nexpected = {expected}\n"
        + textwrap.dedent(child)
        + "\nasyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "the parent is well" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    return done


@guarantee("fork", "one owner", "kept", on=MEMORY)
def test_every_touch_is_an_error_that_says_what_to_do() -> None:
    done = run(
        """
        def in_the_child(names):
            client, session, lease = names["client"], names["session"], names["lease"]
            ticket = names["ticket"]
            touches = {
                "held": lambda: lease.held,
                "loss": lambda: lease.loss,
                "check": lease.check,
                "release": lambda: drive(lease.release()),
                "update": lambda: drive(lease.update(data=b"x")),
                "wait_lost": lambda: drive(lease.wait_lost()),
                "enter": lambda: drive(lease.__aenter__()),
                "leave": lambda: drive(lease.__aexit__(None, None, None)),
                "lock": lambda: drive(session.mutex("x").lock()),
                "lock of the client": lambda: drive(client.mutex("x").lock()),
                "try": lambda: drive(session.mutex("x").try_lock()),
                "inspect": lambda: drive(session.mutex("x").inspect()),
                "acquire": lambda: drive(session.semaphore("s").acquire()),
                "enqueue": lambda: drive(session.semaphore("s").enqueue()),
                "describe": lambda: drive(session.semaphore("s").describe()),
                "campaign": lambda: drive(session.election("e").campaign()),
                "granted": lambda: ticket.granted,
                "withdraw": lambda: drive(ticket.withdraw()),
                "wait": lambda: drive(ticket.wait()),
                "watch": lambda: drive(anext(session.semaphore("s").watch(data=True))),
                "state": lambda: session.state,
                "close": lambda: drive(session.aclose()),
                "detach": lambda: drive(session.detach()),
                "leave the session": lambda: drive(session.__aexit__(None, None, None)),
                "session": lambda: drive(client.session()),
                "nodes": lambda: drive(client.list_nodes()),
                "events": client.events,
                "aclose": lambda: drive(client.aclose()),
                "leave the client": lambda: drive(client.__aexit__(None, None, None)),
            }
            try:
                for what, touch in touches.items():
                    expect_misuse(what, touch)
                assert [None for _ in names["states"].aclose().__await__()] == []  # quiet
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        """
    )
    assert done.stderr == ""


@pytest.mark.parametrize("leave", ["sys.exit(7)", "raise KeyError('mine')", "pass"])
def test_a_child_that_leaves_the_blocks_keeps_its_error_and_ends(leave: str) -> None:
    expected = {"sys.exit(7)": 7, "raise KeyError('mine')": 1, "pass": 1}[leave]
    run(
        f"""
        def in_the_child(names):
            {leave}
            names.clear()
        """,
        expected,
    )


@guarantee("fork", "others proceed", on=MEMORY)
def test_a_child_may_use_a_client_of_its_own_and_drop_its_parent_s() -> None:
    run(
        """
        def in_the_child(names):
            async def work():
                async with tenure.connect("memory://") as client, client.mutex("m").lock() as lease:
                    assert lease.held

            names.clear()
            gc.collect()
            thread = threading.Thread(target=lambda: asyncio.run(work()))
            thread.start()
            thread.join()
            os._exit(0)
        """
    )


def test_a_process_counts_the_forks_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    born = fork.generation
    fork.check(born, "this")
    with pytest.raises(Misuse, match="this belongs to the parent"):
        fork.check(born - 1, "this")
    monkeypatch.setattr(fork, "generation", born)
    fork._count()
    assert fork.generation == born + 1
    with pytest.raises(Misuse):
        fork.check(born, "this")


async def test_a_fork_that_is_only_imagined_looks_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.client() as client:
        session = await client.session()
        waiting = await session.mutex("m").lock()
        waiter = asyncio.create_task(session.mutex("m").lock(timeout=60))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(fork, "generation", fork.generation + 1)
            with pytest.raises(Misuse):
                await waiting.release()
            waiter.cancel()
            await asyncio.wait([waiter])
            client._core.soon(lambda: pytest.fail("called in a forked child"))
            with pytest.raises(Misuse):
                await session.aclose()
        await session.aclose()
