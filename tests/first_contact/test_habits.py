"""Habits of other libraries: each works, or is answered with the form of tenure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from textwrap import indent

import pytest

import tenure
from tenure import blocking
from tests.engines.stores import stores
from tests.first_contact.table import TABLE, Typed

ENGINES = (
    *("memory", "sqlite", "redis"),
    *(
        pytest.param(each, marks=pytest.mark.exhaustive)
        for each in ("sqlite-portable", "postgresql", "etcd", "tenure", "ydb", "dflockd")
    ),
)
RIVALS = {
    *("asyncio", "threading", "filelock", "portalocker", "redis-py"),
    *("python-redis-lock", "tooz", "kazoo", "etcd3"),
}


@pytest.fixture(scope="module", params=ENGINES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as url:
        yield url


def program(text: str, *, sync: bool) -> dict[str, object]:
    """Return a namespace with the function `typed` of that body."""
    namespace: dict[str, object] = {}
    head = f"{'' if sync else 'async '}def typed(tenure, client, url, lease):"
    exec(f"{head}\n{indent(text, '    ')}\n", namespace)
    return namespace


def expect(typed: Typed, says: str, error: BaseException | None) -> None:
    if says in {"", "-"}:
        if error is not None:
            raise error
        return
    assert isinstance(error, typed.error), repr(error)
    assert re.search(re.escape(says), str(error)), str(error)
    assert len(re.split(r"[.;:] ", str(error))) <= 5, "a sentence or two"


@pytest.mark.filterwarnings("ignore:.*was dropped by the program:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")
@pytest.mark.parametrize("typed", TABLE, ids=str)
async def test_what_is_typed_in_an_asynchronous_program(typed: Typed, url: str) -> None:
    raised: BaseException | None = None
    function = program(typed.text, sync=False)["typed"]
    async with tenure.connect(url) as client:
        lease = await client.mutex("held").lock()
        try:
            await asyncio.wait_for(function(tenure, client, url, lease), 20)  # type: ignore[operator]
        except Exception as error:
            raised = error
        await lease.release()
    expect(typed, typed.says, raised)


@pytest.mark.filterwarnings("ignore:.*was dropped by the program:ResourceWarning")
@pytest.mark.parametrize("typed", TABLE, ids=str)
def test_what_is_typed_in_a_program_of_threads(typed: Typed, url: str) -> None:
    raised: BaseException | None = None
    function = program(typed.synchronous, sync=True)["typed"]
    with blocking.connect(url) as client:
        lease = client.mutex("held").lock()
        try:
            function(blocking, client, url, lease)  # type: ignore[operator]
        except Exception as error:
            raised = error
        lease.release()
    expect(typed, typed.sync_says or typed.says, raised)


def test_the_table_has_the_first_fifty_things_of_users_of_each_library() -> None:
    assert len(TABLE) >= 50
    assert {name for each in TABLE for name in each.habit.split()} == RIVALS
    assert len({each.text for each in TABLE}) == len(TABLE)


def test_python_suggests_what_no_habit_explains() -> None:
    with blocking.connect("memory://habits") as client:
        with pytest.raises(AttributeError, match=r"'Client' object has no attribute 'mutexx'") as e:
            client.mutexx("a")  # type: ignore[attr-defined]
        assert (e.value.name, e.value.obj) == ("mutexx", client)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'$"):
            client.mutex("a", nonsense=1)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"^module 'tenure' has no attribute 'nonsense'$"):
        _ = tenure.nonsense
