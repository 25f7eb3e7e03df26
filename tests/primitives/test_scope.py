# ruff: noqa: PT012  what raises here is a block, with its body
"""Cancelling a block from outside: one cancellation at a time, and none that strays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator
from types import TracebackType
from weakref import ref

import pytest

from tenure._client.handles import note_failure
from tenure._client.scope import Scope, entered_scopes
from tenure.errors import Misuse
from tests.primitives.helpers import EnteredScopes, turns


class Over(Exception):
    """What a block raises that was triggered."""


class Block:
    """The least that uses a scope."""

    def __init__(self, name: str = "block") -> None:
        self.name = name
        self.scope = Scope(self)
        self.over = False

    def end(self) -> None:
        self.over = True
        self.scope.trigger()

    async def __aenter__(self) -> Block:
        self.scope.enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ours = self.scope.exit(error)
        if self.over and (error is None or ours):
            raise Over(self.name)


def this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


@pytest.fixture(autouse=True)
def nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    scopes = EnteredScopes()
    scopes.watch(monkeypatch)
    yield
    gc.collect()
    assert scopes.count == 0


async def test_a_block_that_nothing_happens_to_changes_nothing() -> None:
    async with Block():
        await turns(2)
    assert this_task().cancelling() == 0


async def test_a_triggered_block_is_cancelled_and_raises_its_own_error() -> None:
    async with asyncio.TaskGroup() as group:

        async def body() -> None:
            with pytest.raises(Over):
                async with block:
                    await asyncio.Event().wait()
            assert this_task().cancelling() == 0
            await turns(3)  # and no stray cancellation comes

        block = Block()
        group.create_task(body())
        await turns(1)
        block.end()


async def test_triggered_twice_it_is_cancelled_once() -> None:
    block = Block()
    with pytest.raises(Over):
        async with block:
            asyncio.get_running_loop().call_soon(block.end)
            asyncio.get_running_loop().call_soon(block.end)
            await asyncio.Event().wait()
    await turns(3)


async def test_a_block_that_nobody_is_inside_is_not_cancelled() -> None:
    block = Block()
    block.end()
    block = Block()
    async with block:
        pass
    block.end()
    await turns(3)
    assert this_task().cancelling() == 0


async def test_the_task_s_own_trigger_takes_effect_at_its_next_wait() -> None:
    block = Block()
    with pytest.raises(Over):
        async with block:
            block.end()
            await turns(2)
            pytest.fail("went on")
    assert this_task().cancelling() == 0
    await turns(3)


async def test_a_block_left_before_the_cancellation_came_is_not_followed_by_it() -> None:
    block = Block()
    with pytest.raises(Over):
        async with block:
            block.end()
    await turns(3)
    assert this_task().cancelling() == 0


@pytest.mark.parametrize("first", ["outside", "trigger"])
async def test_cancellation_from_outside_wins(first: str) -> None:
    block = Block()
    counts: list[int] = []

    async def body() -> None:
        try:
            async with block:
                await asyncio.Event().wait()
        finally:
            counts.append(this_task().cancelling())

    task = asyncio.create_task(body())
    await turns(1)
    if first == "outside":
        task.cancel()
        block.end()
    else:
        block.end()
        await turns(1)  # the trigger's cancellation is under way
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert counts == [1]


async def test_a_block_entered_by_a_task_that_is_being_cancelled_still_claims_its_own() -> None:
    block = Block()

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        finally:  # cleaning up, with the cancellation on its way
            with pytest.raises(Over):
                async with block:
                    asyncio.get_running_loop().call_soon(block.end)
                    await asyncio.Event().wait()
            assert this_task().cancelling() == 1

    task = asyncio.create_task(body())
    await turns(1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_body_that_swallows_the_cancellation_raises_all_the_same() -> None:
    block = Block()
    with pytest.raises(Over):
        async with block:
            block.end()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await turns(2)
    assert this_task().cancelling() == 0
    await turns(2)


async def test_the_body_s_own_error_is_not_replaced() -> None:
    block = Block()
    with pytest.raises(KeyError):
        async with block:
            block.end()
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError("x")
    assert this_task().cancelling() == 0


async def test_of_nested_blocks_that_end_at_once_the_innermost_raises() -> None:
    outer, inner = Block("outer"), Block("inner")
    with pytest.raises(Over, match="inner"):
        async with outer, inner:
            outer.end()
            inner.end()
            await asyncio.Event().wait()
    assert this_task().cancelling() == 0
    await turns(3)


async def test_caught_inside_the_outer_block_is_cancelled_at_its_next_wait() -> None:
    outer, middle, inner = Block("outer"), Block("middle"), Block("inner")
    caught: list[str] = []
    with pytest.raises(Over, match="outer"):
        async with outer:
            try:
                async with middle:
                    try:
                        async with inner:
                            for block in (outer, inner, middle):
                                block.end()
                            await asyncio.Event().wait()
                    except Over as error:
                        caught.append(str(error))
                    await asyncio.Event().wait()
            except Over as error:
                caught.append(str(error))
            await asyncio.Event().wait()
    assert caught == ["inner", "middle"]
    assert this_task().cancelling() == 0
    await turns(3)


async def test_an_inner_block_that_has_not_ended_lets_the_cancellation_pass() -> None:
    outer, inner = Block("outer"), Block("inner")
    with pytest.raises(Over, match="outer"):
        async with outer, inner:
            outer.end()
            await asyncio.Event().wait()
    assert this_task().cancelling() == 0


async def test_an_inner_block_that_ends_after_the_outer_one_still_ends_in_one_error() -> None:
    outer, inner = Block("outer"), Block("inner")
    with pytest.raises(Over):
        async with outer, inner:
            loop = asyncio.get_running_loop()
            loop.call_soon(outer.end)
            loop.call_soon(loop.call_soon, inner.end)
            await asyncio.Event().wait()
    assert this_task().cancelling() == 0
    await turns(3)


@pytest.mark.parametrize("inside", [True, False])
async def test_it_lives_with_asyncio_s_own_timeouts(inside: bool) -> None:
    block = Block()
    with pytest.raises(TimeoutError if inside else Over):
        if inside:
            async with block, asyncio.timeout(1):
                await asyncio.Event().wait()
        else:
            async with asyncio.timeout(1), block:
                asyncio.get_running_loop().call_later(0.5, block.end)
                await asyncio.Event().wait()
    assert this_task().cancelling() == 0
    await turns(3)


async def test_a_timeout_and_a_trigger_in_the_same_instant_end_in_one_of_the_two() -> None:
    for timeout_outside in (True, False):
        block = Block()
        asyncio.get_running_loop().call_later(1, block.end)
        with pytest.raises((TimeoutError, Over)):
            if timeout_outside:
                async with asyncio.timeout(1), block:
                    await asyncio.Event().wait()
            else:
                async with block, asyncio.timeout(1):
                    await asyncio.Event().wait()
        assert this_task().cancelling() == 0
        await turns(3)


async def test_inside_a_task_group_siblings_end_and_the_error_is_a_leaf() -> None:
    ended: list[str] = []

    async def sibling() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("sibling")

    async def holder() -> None:
        try:
            async with Block() as block:
                block.end()
                await asyncio.Event().wait()
        finally:
            assert this_task().cancelling() == 0

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(sibling())
            group.create_task(holder())
    assert raised.group_contains(Over)
    assert ended == ["sibling"]


async def test_a_task_group_inside_a_block_that_ends_is_cancelled_whole() -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("child")

    with pytest.raises(Over):
        async with Block() as block, asyncio.TaskGroup() as group:
            group.create_task(child())
            await turns(1)
            block.end()
    assert ended == ["child"]
    assert this_task().cancelling() == 0
    await turns(3)


async def test_blocks_may_be_left_out_of_order() -> None:
    outer, middle, inner = Block("outer"), Block("middle"), Block("inner")
    for block in (outer, middle, inner):
        await block.__aenter__()
    await middle.__aexit__(None, None, None)
    assert [scope.owner for scope in entered_scopes(this_task())] == [inner, outer]
    await outer.__aexit__(None, None, None)
    assert [scope.owner for scope in entered_scopes(this_task())] == [inner]
    await inner.__aexit__(None, None, None)
    assert list(entered_scopes(this_task())) == []


async def test_a_block_may_be_left_by_another_task_than_entered_it() -> None:
    block = Block()

    async def enter() -> None:
        await block.__aenter__()

    await asyncio.create_task(enter())
    await block.__aexit__(None, None, None)


async def test_no_task_is_inside_of_nothing() -> None:
    assert list(entered_scopes(None)) == []
    assert list(entered_scopes(this_task())) == []
    scope = Scope(None)
    scope.enter()
    assert scope.task is this_task()
    scope.exit(None)
    assert Scope(None).task is None


async def test_only_a_task_can_enter() -> None:
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            Scope(None).enter()
        except Misuse as error:
            failed.append(error)

    asyncio.get_running_loop().call_soon(enter)
    await turns(1)
    assert str(failed[0]) == "a block can be entered only inside a task"


async def test_a_block_is_left_once_after_it_was_entered() -> None:
    scope = Scope(None)
    for _ in range(2):
        with pytest.raises(Misuse, match=r"^a block is left once, after it was entered$"):
            scope.exit(None)
        scope.enter()
        assert not scope.exit(None)


def test_a_task_abandoned_inside_a_block_is_collected() -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)  # "Task was destroyed"

    async def body() -> None:
        async with Block():
            await asyncio.Event().wait()

    async def abandon() -> asyncio.Task[None]:
        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(abandon())
    known = ref(task)
    loop.close()
    del task
    gc.collect()
    assert known() is None


async def test_a_task_that_has_left_its_blocks_keeps_none_of_them() -> None:
    assert list(entered_scopes(None)) == list(entered_scopes(this_task())) == []
    async with Block() as outer, Block() as inner:
        assert list(entered_scopes(this_task())) == [inner.scope, outer.scope]
    assert list(entered_scopes(this_task())) == []
    left = ref(inner)
    del inner
    assert left() is None


async def test_a_block_that_was_left_does_not_wait_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        block = Block()
        left = ref(block)
        async with block:
            pass
        del block
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_a_trigger_from_an_eager_task_does_not_cancel_the_one_that_runs_it() -> None:
    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009
    block = Block()

    async def child() -> None:
        block.end()  # runs inside of create_task, and so inside of the block's own task

    with pytest.raises(Over):
        async with block:
            task = asyncio.create_task(child())
    assert task.done()
    assert this_task().cancelling() == 0
    await turns(3)


def test_a_failure_never_takes_the_place_of_the_body_s_error() -> None:
    with pytest.raises(KeyError):
        note_failure(None, KeyError("x"), "the release")
    error = ValueError("the body's")
    note_failure(error, KeyError("x"), "the release")
    assert error.__notes__ == ["and the release failed: 'x'"]
