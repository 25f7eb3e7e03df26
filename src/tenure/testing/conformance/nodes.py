"""Nodes: namespaces with a configuration."""

from __future__ import annotations

from tenure.engines.contract import Attach, Place
from tenure.errors import (
    InvalidArgument,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SessionExpired,
)
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import raises
from tenure.testing.recorder import Recorder
from tenure.testing.stage import WINDOW, Stage

FULL = NodeConfig(
    self_check_period=2.5,
    session_grace_period=7.25,
    read_consistency="strict",
    attach_consistency="relaxed",
    rate_limiter_counters_mode="detailed",
)


@behaviour()
async def the_default_node_is_always_there(stage: Stage) -> None:
    assert list(await stage.eye.list_nodes()) == [DEFAULT_NODE]
    described = await stage.eye.describe_node(DEFAULT_NODE)
    assert (described.path, described.config) == (DEFAULT_NODE, NodeConfig())
    with raises(NodeExists):
        await stage.eye.create_node(DEFAULT_NODE, NodeConfig(), exist_ok=False)


@behaviour()
async def the_default_node_cannot_be_dropped_even_by_force(stage: Stage) -> None:
    for force in (False, True):
        with raises(InvalidArgument):
            await stage.eye.drop_node(DEFAULT_NODE, force=force)
    await stage.eye.describe_node(DEFAULT_NODE)


@behaviour()
async def a_node_keeps_the_configuration_it_was_created_with(stage: Stage) -> None:
    await stage.eye.create_node("/full", FULL, exist_ok=False)
    await stage.eye.create_node("/plain", NodeConfig(), exist_ok=False)
    other = await stage.engine()
    assert (await other.describe_node("/full")).config == FULL
    assert (await other.describe_node("/plain")).config == NodeConfig()


@behaviour()
async def creating_a_node_that_exists_fails_and_changes_nothing(stage: Stage) -> None:
    await stage.eye.create_node("/full", FULL, exist_ok=False)
    with raises(NodeExists):
        await stage.eye.create_node("/full", NodeConfig(self_check_period=9), exist_ok=False)
    assert (await stage.eye.describe_node("/full")).config == FULL


@behaviour()
async def creating_a_node_that_may_exist_changes_nothing_if_it_does(stage: Stage) -> None:
    await stage.eye.create_node("/full", FULL, exist_ok=True)
    await stage.eye.create_node("/full", NodeConfig(self_check_period=9), exist_ok=True)
    assert (await stage.eye.describe_node("/full")).config == FULL


@behaviour()
async def altering_a_node_changes_what_is_set_and_leaves_the_rest_alone(stage: Stage) -> None:
    await stage.eye.create_node("/full", FULL, exist_ok=False)
    await stage.eye.alter_node("/full", NodeConfig())
    assert (await stage.eye.describe_node("/full")).config == FULL
    await stage.eye.alter_node("/full", NodeConfig(self_check_period=4, read_consistency="relaxed"))
    assert (await stage.eye.describe_node("/full")).config == NodeConfig(
        self_check_period=4,
        session_grace_period=7.25,
        read_consistency="relaxed",
        attach_consistency="relaxed",
        rate_limiter_counters_mode="detailed",
    )


@behaviour()
async def the_default_node_can_be_altered(stage: Stage) -> None:
    await stage.eye.alter_node(DEFAULT_NODE, NodeConfig(session_grace_period=3))
    described = await stage.eye.describe_node(DEFAULT_NODE)
    assert described.config == NodeConfig(session_grace_period=3)


@behaviour()
async def a_node_needs_no_parent_and_makes_none(stage: Stage) -> None:
    await stage.eye.create_node("/a/b/c", NodeConfig(), exist_ok=False)
    assert list(await stage.eye.list_nodes()) == ["/a/b/c", DEFAULT_NODE]
    await stage.eye.create_node("/a", NodeConfig(), exist_ok=False)
    await stage.eye.drop_node("/a", force=False)
    assert list(await stage.eye.list_nodes()) == ["/a/b/c", DEFAULT_NODE]


@behaviour()
async def nodes_are_listed_in_the_order_of_their_paths(stage: Stage) -> None:
    paths = ["/z", "/a", "/B", "/a/b", "/a-b", "/a.b", "/a_b", "/1", "/10", "/2"]
    for path in paths:
        await stage.eye.create_node(path, NodeConfig(), exist_ok=False)
    other = await stage.engine()
    assert list(await other.list_nodes()) == sorted([*paths, DEFAULT_NODE])


@behaviour()
async def a_path_may_be_as_long_as_the_rules_allow(stage: Stage) -> None:
    longest = "".join("/" + letter * 255 for letter in "abcd")
    assert len(longest) == 1024
    await stage.eye.create_node(longest, NodeConfig(), exist_ok=False)
    assert longest in await stage.eye.list_nodes()
    program = await stage.program(longest)
    await program.lock("m")


@behaviour()
async def operations_on_a_missing_node_are_refused(stage: Stage) -> None:
    eye, missing = stage.eye, "/missing"
    with raises(NodeNotFound, "describe_node"):
        await eye.describe_node(missing)
    with raises(NodeNotFound, "alter_node"):
        await eye.alter_node(missing, NodeConfig(self_check_period=1))
    for force in (False, True):
        with raises(NodeNotFound, "drop_node"):
            await eye.drop_node(missing, force=force)
    with raises(NodeNotFound, "list_semaphores"):
        await eye.list_semaphores(missing, owners=True, waiters=True)
    with raises(NodeNotFound, "describe_semaphore"):
        await eye.describe_semaphore(missing, "m", owners=True, waiters=True)
    with raises(NodeNotFound, "list_sessions"):
        await eye.list_sessions(missing)
    with raises(NodeNotFound, "attach"):
        await eye.attach(Attach(missing, WINDOW), Recorder())
    assert list(await eye.list_nodes()) == [DEFAULT_NODE]


@behaviour()
async def an_error_says_on_which_node(stage: Stage) -> None:
    with raises(NodeNotFound) as caught:
        await stage.eye.describe_node("/missing")
    assert caught.error.node == "/missing"
    assert "/missing" in str(caught.error)


@behaviour()
async def a_dropped_node_is_gone_for_everybody(stage: Stage) -> None:
    await stage.eye.create_node("/n", FULL, exist_ok=False)
    other = await stage.engine()
    await other.drop_node("/n", force=False)
    assert list(await stage.eye.list_nodes()) == [DEFAULT_NODE]
    with raises(NodeNotFound):
        await stage.eye.describe_node("/n")


@behaviour()
async def a_node_that_is_created_again_is_a_new_one(stage: Stage) -> None:
    await stage.eye.create_node("/n", FULL, exist_ok=False)
    program = await stage.program("/n")
    await program.lock("m")
    if stage.capabilities.lasting:
        await program.create("pool", 3, b"old")
    await stage.eye.drop_node("/n", force=True)
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    assert (await stage.eye.describe_node("/n")).config == NodeConfig()
    assert not await stage.eye.list_semaphores("/n", owners=True, waiters=True)
    assert not await stage.eye.list_sessions("/n")
    successor = await stage.program("/n")
    assert (await successor.lock("m")).place is Place.GRANTED
    await program.ended()


@behaviour()
async def an_attached_session_keeps_its_node_from_being_dropped(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    program = await stage.program("/n")
    with raises(NodeBusy):
        await stage.eye.drop_node("/n", force=False)
    assert (await program.lock("m")).place is Place.GRANTED
    await program.close()
    await stage.eye.drop_node("/n", force=False)


@behaviour()
async def a_node_dropped_by_force_ends_its_sessions_as_expired(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    owner, waiter = await stage.programs(2, "/n")
    other_program = await stage.program()
    await owner.lock("m")
    await waiter.lock("m")
    untouched = await other_program.lock("m")
    await stage.eye.drop_node("/n", force=True)
    for program in (owner, waiter):
        await program.ended()
        with raises(SessionExpired):
            await program.lock("other")
    assert not waiter.recorder.grants
    assert other_program.recorder.end is None
    assert await other_program.queue("m") == ([untouched.program.id], [])


@behaviour()
async def a_detached_session_does_not_hold_its_node(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    program = await stage.program("/n")
    await program.lock("m")
    await program.detach()
    await stage.eye.drop_node("/n", force=False)
    assert list(await stage.eye.list_nodes()) == [DEFAULT_NODE]


@behaviour()
async def one_name_on_two_nodes_is_two_semaphores(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    await stage.eye.create_node("/n/m", NodeConfig(), exist_ok=False)
    for node in (DEFAULT_NODE, "/n", "/n/m"):
        program = await stage.program(node)
        for name in ("m", "m/m"):
            assert (await program.lock(name)).place is Place.GRANTED
            assert await program.queue(name) == ([program.id], [])


@behaviour()
async def a_node_counts_its_sessions_and_semaphores_if_it_counts_any(
    stage: Stage,
) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    one, two = await stage.programs(2, "/n")
    other_program = await stage.program()
    for program in (one, two, other_program):
        await program.lock("m")
    await one.lock("another")
    described = await stage.eye.describe_node("/n")
    assert described.sessions in {2, None}
    assert described.semaphores in {2, None}
