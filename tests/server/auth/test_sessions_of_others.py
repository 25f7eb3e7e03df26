"""Sessions of another identity: not renewed, not resumed, and no sign that they exist."""

from __future__ import annotations

from typing import Literal

import pytest

from tenure.engines.contract import Attach
from tenure.errors import AuthenticationFailed, NodeNotFound, TenureError
from tenure.model import NodeConfig
from tenure.server.auth import Authenticator
from tenure.server.auth.identity import Permissions
from tenure.server.native import NativeListener
from tenure.testing.recorder import Recorder
from tenure.wire.messages import Attach as AttachMessage
from tenure.wire.messages import Failed, Proven, RenewAside, Unproven
from tests.server.auth.several import rights, several, token_of
from tests.server.talking import called, serving

MINE, THEIRS = token_of("mine"), token_of("theirs")
EVERY = {"mine": rights(), "theirs": rights()}
SECRET = "/secret"


async def test_a_second_token_does_not_renew_what_another_identity_holds() -> None:
    authenticator = Authenticator({MINE: "mine", THEIRS: "theirs"})
    async with (
        serving(authenticator=authenticator) as listener,
        called(listener, greet=False) as holder,
        called(listener, holder.program, greet=False) as same,
        called(listener, holder.program, greet=False) as other,
    ):
        await holder.greet(MINE)
        number = (await holder.attach()).session_id
        await same.greet(MINE)
        same.say(RenewAside(1, "/default", number, b"key"))
        await same.hear(Proven)
        await other.greet(THEIRS)
        other.say(RenewAside(1, "/default", number, b"key"))
        await other.hear(Unproven)


@pytest.mark.parametrize("kind", ["again", "resume"])
async def test_a_hidden_session_is_answered_like_one_on_a_node_that_is_not_there(
    kind: Literal["again", "resume"],
) -> None:
    async with several({"mine": rights(), "theirs": rights(Permissions.parse({}))}) as server:
        await server.store.create_node(SECRET, NodeConfig(), exist_ok=True)
        listener = server.listeners["tenure"]
        assert isinstance(listener, NativeListener)
        async with (
            called(listener, greet=False) as holder,
            called(listener, holder.program, greet=False) as other,
        ):
            await holder.greet(MINE)
            number = (await holder.attach(node=SECRET)).session_id
            await other.greet(THEIRS)
            said = []
            for node in (SECRET, "/nowhere"):
                attach = AttachMessage(1, 1, kind, node, 10.0, key=b"key", session_id=number)
                other.say(attach)
                failed = await other.hear(Failed)
                said.append(str(failed.error).replace(node, "NODE"))
            assert said[0] == said[1]


@pytest.mark.parametrize("protocol", ["tenure", "ydb"])
async def test_a_hidden_node_has_the_error_of_one_that_is_not_there(protocol: str) -> None:
    some = rights(Permissions.parse({"/open": "administer"}))
    async with several({"theirs": some}) as server:
        await server.store.create_node(SECRET, NodeConfig(), exist_ok=True)
        async with server.client(protocol, "theirs") as engine:
            errors: list[TenureError] = []
            for node in (SECRET, "/nowhere"):
                with pytest.raises(NodeNotFound) as failed:
                    await engine.attach(Attach(node, 10.0), Recorder())
                errors.append(failed.value)
            first, second = (str(each) for each in errors)
            assert first.replace(SECRET, "/nowhere") == second


async def test_a_token_without_the_default_node_is_told_what_it_may_use() -> None:
    some = rights(Permissions.parse({"/open": "administer", "/more": "read"}))
    async with several({"theirs": some}) as server, server.client("tenure", "theirs") as engine:
        usable = "may not use /default; it may use /more, /open"
        with pytest.raises(AuthenticationFailed, match=usable):
            await engine.attach(Attach("/default", 10.0), Recorder())
