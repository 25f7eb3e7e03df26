"""What counts against the limits of a server."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine
from tenure.errors import EngineError, InvalidArgument
from tenure.server.limits import Count, LimitReached, Limits
from tenure.server.semaphores import SemaphoreCounts
from tenure.testing import VirtualClock


class Nobody:
    """Hears what is said to a session, and does nothing about it."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


async def store(clock: VirtualClock) -> Engine:
    engine = connect_engine("memory://", clock)
    await engine.open()
    return engine


def test_every_limit_says_what_it_means() -> None:
    assert all(each.metadata["meaning"] for each in dataclasses.fields(Limits))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"connections": 0}, "connections is a positive whole number, not 0"),
        ({"sessions": 1.5}, "sessions is a positive whole number, not 1.5"),
        ({"sessions": True}, "sessions is a positive whole number, not True"),
        ({"greeting_time": float("nan")}, "greeting_time is a positive number, not nan"),
        ({"data_bytes": 2**20 + 1}, "data_bytes is at most 1048576"),
        ({"message_bytes": 2**20}, "leaves no room"),
        ({"output_bytes": 2**20}, "at least twice message_bytes"),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        Limits(**wrong)  # type: ignore[arg-type]


def test_a_count_refuses_beyond_its_limit_and_names_it() -> None:
    count = Count("sessions", 1)
    count.take()
    with pytest.raises(LimitReached, match="reached its limit sessions = 1") as caught:
        count.take(node="/default")
    assert caught.value.limit == "sessions"
    assert caught.value.node == "/default"
    assert count.taken == 1
    count.release()
    count.take()


def test_what_exists_already_is_counted_and_never_refused() -> None:
    count = Count("sessions", 1)
    count.take_anyway()
    count.take_anyway()
    assert count.taken == 2
    count.release()
    with pytest.raises(LimitReached):
        count.take()


async def test_an_ephemeral_semaphore_counts_while_it_has_requests() -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits(semaphores=1))
    semaphores.add_request("/default", "a", ephemeral=True)
    semaphores.add_request("/default", "a", ephemeral=True)
    assert semaphores.taken == 1
    with pytest.raises(LimitReached, match="semaphores = 1"):
        semaphores.add_request("/default", "b", ephemeral=True)
    semaphores.remove_request("/default", "a")
    with pytest.raises(LimitReached):
        semaphores.add_request("/default", "b", ephemeral=True)
    semaphores.remove_request("/default", "a")
    semaphores.add_request("/default", "b", ephemeral=True)


async def test_a_queue_has_a_longest_length() -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits(queue_length=2))
    semaphores.add_request("/default", "a", ephemeral=False)
    semaphores.add_existing_request("/default", "a", ephemeral=False)
    with pytest.raises(LimitReached, match="queue_length = 2") as caught:
        semaphores.add_request("/default", "a", ephemeral=False)
    assert (caught.value.node, caught.value.name) == ("/default", "a")
    semaphores.add_request("/other", "a", ephemeral=False)
    semaphores.remove_request("/default", "a")
    semaphores.add_request("/default", "a", ephemeral=False)
    assert semaphores.taken == 0


async def test_a_queue_joined_in_the_wrong_kind_leaves_the_count_right() -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits())
    semaphores.add_request("/default", "a", ephemeral=False)
    semaphores.add_request("/default", "a", ephemeral=True)
    semaphores.remove_request("/default", "a")
    semaphores.remove_request("/default", "a")
    assert semaphores.taken == 0


async def test_lasting_semaphores_are_counted_in_the_store_before_one_is_refused() -> None:
    clock = VirtualClock()
    engine = await store(clock)
    session = await engine.attach(Attach("/default", 30.0), Nobody())  # type: ignore[arg-type]
    semaphores = SemaphoreCounts(engine, Limits(semaphores=2))

    async def create(name: str) -> None:
        async with semaphores.creating("/default", name):
            await session.create_semaphore(name, 1, b"", exist_ok=True)

    await create("a")
    await create("b")
    await create("a")  # it is one of them
    with pytest.raises(LimitReached, match="semaphores = 2"):
        await create("c")
    await session.delete_semaphore("a", force=False)  # by whoever else uses the store
    with pytest.raises(LimitReached):
        await create("c")  # the last counting is too recent
    clock.advance(10.0)
    await create("c")
    semaphores.deleted("/default", "c")
    await create("d")
    await engine.aclose()


async def create(
    semaphores: SemaphoreCounts, name: str, error: type[BaseException] | None = None
) -> None:
    """Create a semaphore in no store; that store fails with the error."""
    async with semaphores.creating("/default", name):
        if error is not None:
            raise error("injected")


async def test_a_semaphore_counts_from_before_its_creation_until_the_store_refuses_it() -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits(semaphores=1))
    with pytest.raises(InvalidArgument):
        await create(semaphores, "a", InvalidArgument)
    assert semaphores.taken == 0
    async with semaphores.creating("/default", "a"):
        assert semaphores.taken == 1
        with pytest.raises(LimitReached, match="semaphores = 1"):
            await create(semaphores, "b")
    assert semaphores.taken == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError, EngineError])
async def test_a_semaphore_that_may_exist_counts_until_the_store_is_counted_anew(
    error: type[BaseException],
) -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits(semaphores=1))
    with pytest.raises(error):
        await create(semaphores, "a", error)
    assert semaphores.taken == 1
    await create(semaphores, "b")
    assert semaphores.taken == 1, "the store does not have the first one"


async def test_one_refused_creation_does_not_stop_another_one_from_counting() -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits(semaphores=1))
    async with semaphores.creating("/default", "a"):
        with pytest.raises(InvalidArgument):
            await create(semaphores, "a", InvalidArgument)
        assert semaphores.taken == 1
    with pytest.raises(InvalidArgument):
        await create(semaphores, "a", InvalidArgument)
    assert semaphores.taken == 1, "it was there before"


async def test_a_counting_of_the_store_forgets_no_semaphore_that_is_being_created() -> None:
    semaphores = SemaphoreCounts(await store(VirtualClock()), Limits())
    async with semaphores.creating("/default", "a"):
        await semaphores.count()
        assert semaphores.taken == 1
