"""Answers that the server keeps, and the client has received otherwise."""

from __future__ import annotations

import asyncio

from tenure.engines.contract import Place
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.server.limits import Limits
from tenure.testing.recorder import Detached
from tests.engines.native.cable import on_a_cable
from tests.server.served import served

KEPT = 8
"""Answers that the server keeps for a session, at the most."""


async def test_requests_after_an_outage_do_not_exceed_the_limit_of_kept_answers() -> None:
    with served("memory://", limits=Limits(kept_answers=KEPT)) as server:
        async with on_a_cable(server.address) as (stage, cable, engine):
            program = await stage.program(engine=engine)
            cable.deaf = True
            answered = [program.send(f"{n}", EPHEMERAL_LIMIT, ephemeral=True) for n in range(KEPT)]

            async def stored() -> bool:
                found = await stage.eye.list_semaphores(DEFAULT_NODE, owners=False, waiters=False)
                return len(found) == KEPT

            await stage.until(stored, "the requests in the store")
            cable.out = True
            cable.cut()
            await program.recorder.wait_for(lambda heard: Detached() in heard.said, "the loss")
            unsent = [
                program.send(f"{n}", EPHEMERAL_LIMIT, ephemeral=True) for n in range(KEPT, 2 * KEPT)
            ]
            cable.out = False
            async with asyncio.timeout(30):
                for each in (*answered, *unsent):
                    assert (await each.answered()).place is Place.GRANTED
