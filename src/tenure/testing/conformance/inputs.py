"""Invalid values: every engine rejects them with the same kind of error, and changes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from tenure.engines.contract import Attach, Place
from tenure.errors import InvalidArgument
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.recorder import Recorder
from tenure.testing.stage import WINDOW, Stage

Attempt: TypeAlias = Callable[[Any], Awaitable[object]]

MIB = 1024 * 1024
LONE_SURROGATE = "\ud800"
BAD_NAMES = ["", "x" * 1025, "ü" * 513, "🦉" * 257, LONE_SURROGATE]
BAD_DATA = [b"x" * (MIB + 1), "text", ""]
BAD_PATHS = [
    *("", "/", "a", "a/b", "/a/", "//a", "/a//b", "/a b", "/ä", "/a\n", "/a?", "/a\0", "/*"),
    *("/" + "x" * 256, ("/" + "x" * 255) * 4 + "/x"),
]
NAN = float("nan")


async def _refused(attempts: Mapping[str, Attempt], values: list[Any]) -> None:
    for what, attempt in attempts.items():
        for value in values:
            with raises(InvalidArgument, f"{what} with {value!r:.80}"):
                await attempt(value)


async def _no_trace(stage: Stage, names: list[str]) -> None:
    found = await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)
    assert [each.name for each in found] == names


async def _pool(stage: Stage, limit: int = 4) -> Program:
    program = await stage.program()
    await program.create("pool", limit, b"before")
    return program


@behaviour()
async def a_name_has_from_1_to_1024_bytes_of_text(stage: Stage) -> None:
    program = await stage.program()
    session = program.session

    async def watch(name: str) -> None:
        await program.watch(name)

    attempts: dict[str, Attempt] = {
        "describe": program.describe,
        "update": lambda name: session.update_semaphore(name, b""),
        "delete": lambda name: session.delete_semaphore(name, force=False),
        "lock": program.lock,
        "try": lambda name: program.lock(name, timeout=0),
        "enqueue": program.enqueue,
    }
    if stage.capabilities.lasting:
        attempts["create"] = lambda name: program.create(name, 1)
    if stage.capabilities.watch:
        attempts["watch"] = watch
    await _refused(attempts, BAD_NAMES)
    await _no_trace(stage, [])


@behaviour("lasting")
async def data_is_bytes_and_at_most_a_mebibyte_of_them(stage: Stage) -> None:
    program = await _pool(stage)
    held = await program.enqueue("pool", data=b"before")
    attempts: dict[str, Attempt] = {
        "create": lambda data: program.create("another", 1, data),
        "update": lambda data: program.session.update_semaphore("pool", data),
        "enqueue": lambda data: program.enqueue("pool", data=data),
        "lock": lambda data: program.lock("m", data=data),
        "alter": lambda data: program.alter(held, data=data),
    }
    await _refused(attempts, BAD_DATA)
    await _no_trace(stage, ["pool"])
    found = await program.describe("pool")
    assert (found.data, [each.data for each in found.owners]) == (b"before", [b"before"])


@behaviour()
async def a_mutex_refuses_data_over_a_mebibyte_too(stage: Stage) -> None:
    program = await stage.program()
    await _refused({"lock": lambda data: program.lock("m", data=data)}, [*BAD_DATA, None])
    await _no_trace(stage, [])


@behaviour("lasting")
async def a_limit_is_a_whole_number_from_1_to_two_to_the_64_less_one(stage: Stage) -> None:
    program = await stage.program()

    async def create_where_it_may_exist(limit: int) -> None:
        await program.session.create_semaphore("pool", limit, b"", exist_ok=True)

    attempts: dict[str, Attempt] = {
        "create": lambda limit: program.create("pool", limit),
        "create, or leave": create_where_it_may_exist,
    }
    await _refused(attempts, [0, -1, 2**64, 1.5])
    await _no_trace(stage, [])


@behaviour("lasting")
async def a_count_is_a_whole_number_from_1_to_the_limit(stage: Stage) -> None:
    program = await _pool(stage)
    held = await program.enqueue("pool", 3)
    attempts: dict[str, Attempt] = {
        "enqueue": lambda count: program.enqueue("pool", count),
        "try": lambda count: program.enqueue("pool", count, timeout=0),
        "alter": lambda count: program.alter(held, count=count),
    }
    await _refused(attempts, [0, -1, 5, 2**53, 2**64, 1.5])
    found = await program.describe("pool")
    assert [each.count for each in (*found.owners, *found.waiters)] == [3]


@behaviour()
async def a_count_on_a_mutex_is_at_most_the_whole(stage: Stage) -> None:
    program = await stage.program()
    attempts: dict[str, Attempt] = {
        "enqueue": lambda count: program.enqueue("m", count, ephemeral=True),
        "try": lambda count: program.enqueue("m", count, timeout=0, ephemeral=True),
    }
    await _refused(attempts, [0, -1, 2**53, 2**64 - 2, 2**64, 1.5])
    await _no_trace(stage, [])


@behaviour()
async def a_timeout_is_a_finite_number_of_seconds_zero_or_more(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    held, waiting = await owner.lock("taken"), await owner.lock("taken")
    attempts: dict[str, Attempt] = {
        "lock what is free": lambda timeout: other.lock("free", timeout=timeout),
        "lock what is taken": lambda timeout: other.lock("taken", timeout=timeout),
        "alter what is held": lambda timeout: owner.alter(held, timeout=timeout),
        "alter what waits": lambda timeout: owner.alter(waiting, timeout=timeout),
    }
    await _refused(attempts, [-1, -0.001, float("-inf"), float("inf"), NAN])
    assert await stage.queue("taken") == ([owner.id], [owner.id])
    await _no_trace(stage, ["taken"])


@behaviour()
async def a_recovery_window_is_from_1_second_to_30_minutes(stage: Stage) -> None:
    await _refused(
        {"attach": lambda window: stage.program(window=window)},
        [0, 0.999, -1, 1800.001, float("inf"), NAN],
    )
    assert not await stage.eye.list_sessions(DEFAULT_NODE)


@behaviour()
async def a_sessions_description_has_at_most_1024_bytes(stage: Stage) -> None:
    await _refused(
        {"attach": lambda description: stage.program(description=description)},
        ["x" * 1025, "ü" * 513],
    )
    assert not await stage.eye.list_sessions(DEFAULT_NODE)


@behaviour()
async def a_protection_key_has_at_most_16_bytes(stage: Stage) -> None:
    await _refused({"attach": lambda key: stage.program(key=key)}, [b"x" * 17])
    assert not await stage.eye.list_sessions(DEFAULT_NODE)


@behaviour()
async def a_path_is_made_of_plain_segments(stage: Stage) -> None:
    eye = stage.eye
    attempts: dict[str, Attempt] = {
        "create_node": lambda path: eye.create_node(path, NodeConfig(), exist_ok=True),
        "drop_node": lambda path: eye.drop_node(path, force=False),
        "attach": lambda path: eye.attach(Attach(path, WINDOW), Recorder()),
    }
    await _refused(attempts, BAD_PATHS)
    assert list(await eye.list_nodes()) == [DEFAULT_NODE]


@behaviour()
async def a_refused_request_leaves_its_session_in_good_order(stage: Stage) -> None:
    program, other = await stage.programs(2)
    with raises(InvalidArgument):
        await program.lock("")
    held = await program.lock("m")
    assert held.place is Place.GRANTED
    waiting = await other.lock("m")
    with raises(InvalidArgument):
        await program.enqueue("m", 0, ephemeral=True)
    await program.withdraw(held)
    await waiting.granted()
