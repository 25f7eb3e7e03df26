"""Waits in the console: the page, its picture, the reason on the page of a semaphore, the API."""

from __future__ import annotations

import asyncio
import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure.clock import SystemClock
from tenure.console import reading, views
from tenure.console import waits as waits_module
from tenure.console.graph import HEIGHT, WIDTH, GraphNode, Picture, draw
from tenure.console.observer import Observer
from tenure.core.deadlocks import WAITS, encode
from tenure.engines import connect_engine
from tenure.engines.memory import MemoryEngine
from tenure.model import EPHEMERAL_LIMIT, NodeConfig
from tests.console.planting import Planted
from tests.console.serving import attached, enqueue, observed, served
from tests.console.test_api import get
from tests.console.test_live import events, until


def plain(page: str) -> str:
    """The text of a page in one line."""
    without = re.sub(r'<svg class="graph".*</svg>', " ", page, flags=re.DOTALL)
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without)).split())
    return re.sub(r" ([,;.])(?= )", r"\1", text)


def picture_of(page: str) -> ET.Element:
    found = re.search(r'<svg class="graph".*</svg>', page, flags=re.DOTALL)
    assert found is not None
    return ET.fromstring(found[0])


def labels(picture: ET.Element) -> list[str]:
    """The text in each box."""
    return [" ".join(" ".join(box.itertext()).split()) for box in picture.findall("svg")]


# The page


async def test_a_deadlock_is_named_in_words_and_in_the_picture() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        assert "No task waits inside a lease" in (await browser.get("/waits")).text
        await Planted(console.store).deadlock("a", "b")
        await observed(console)
        page = (await browser.get("/waits")).text
        assert "2 tasks wait, 1 deadlock" in page
        text = plain(page)
        assert "Deadlock: 2 tasks wait for each other" in text
        assert re.search(r"a\.py pid \d+ on db-1, Task-0, is inside a and waits for b for", text)
        assert re.search(r"b\.py pid \d+ on db-1, Task-1, is inside b and waits for a for", text)
        assert text.count("in a deadlock") == 2
        picture = picture_of(page)
        assert picture.get("role") == "img"
        title = picture.find("title")
        assert title is not None
        assert picture.get("aria-labelledby") == title.get("id")
        assert "2 tasks wait, 1 deadlock" in (title.text or "")
        shown = labels(picture)
        assert [each.split()[:2] for each in shown] == [["a.py", "deadlock"], ["b.py", "deadlock"]]
        assert [each.get("class") for each in picture.findall("path")].count("arrow stuck") == 2
        overview = (await browser.get("/")).text
        assert "Deadlock</b> on" in overview


async def test_a_chain_leads_from_the_waiters_to_the_holder_at_the_root() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        planted = Planted(console.store)
        root = await planted.program("import.py", "ledger", host="web-3")
        middle = await planted.program("billing.py", "invoices")
        await planted.wait(middle, "ledger", ["invoices"])
        last = await planted.program("report.py", "paper")
        await planted.wait(last, "invoices", ["paper"])
        await planted.program("plain.py", "invoices")
        await browser.get("/semaphore?name=invoices")  # from now on its queue is read
        await observed(console)

        page = (await browser.get("/waits")).text
        assert "2 tasks wait, no deadlock" in page
        assert "plain.py" not in page
        text = plain(page)
        assert re.search(
            r"billing\.py pid \d+ on db-1 Task-1 invoices ledger \S+ s import\.py pid \d+ on web-3 "
            rf"{middle.id} attached silent for",
            text,
        )
        assert re.search(
            r"report\.py pid \d+ on db-1 Task-1 paper invoices \S+ s billing\.py pid \d+ on db-1 "
            rf"which waits {last.id} attached",
            text,
        )
        holders = text.partition("Holders at the root")[2]
        assert re.search(rf"import\.py pid \d+ on web-3 ledger \S+ s {root.id} attached", holders)
        picture = picture_of(page)
        assert [each.split()[0] for each in labels(picture)] == [
            *("billing.py", "report.py", "import.py")
        ]
        assert len(picture.findall("path")) == 4

        why = plain((await browser.get("/semaphore?name=invoices")).text)
        assert re.search(
            r"Why does it wait\? invoices is held by billing\.py pid \d+ on db-1 for .+ s; "
            rf"session {middle.id} attached .* Its task Task-1 waits for ledger for .+ s\. "
            r"ledger is held by import\.py pid \d+ on web-3 for .* No wait of it is known",
            why,
        )
        assert "Why does it wait" not in (await browser.get("/semaphore?name=paper")).text


async def test_a_chain_shows_a_circle_once() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        await Planted(console.store).deadlock("a", "b")
        await observed(console)
        why = plain((await browser.get("/semaphore?name=a")).text)
        assert why.count("is held by") == 2
        assert "which is shown above" in why
        assert "in a deadlock" in why


async def test_an_open_page_follows_the_waits() -> None:
    async with (
        served() as console,
        console.signed_in("reader") as browser,
        events(browser, "/live/waits") as found,
    ):
        await until(found, lambda _, text: "No task waits" in text)
        one, _ = await Planted(console.store).deadlock("a", "b")
        await until(found, lambda _, text: "2 tasks wait, 1 deadlock" in text)
        await console.store.end_session("/default", one.id)
        await until(found, lambda _, text: "No task waits" in text)


async def test_two_programs_are_found_as_they_publish_their_waits(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    inside = asyncio.Barrier(2)

    async def take(outer: str, inner: str) -> None:
        async with (
            tenure.connect(url) as client,
            client.session() as session,
            session.mutex(outer).lock(),
        ):
            await inside.wait()
            async with session.mutex(inner).lock():
                pass

    tasks = [asyncio.create_task(take(*pair)) for pair in ("ab", "ba")]
    try:
        async with (
            served(connect_engine(url, SystemClock())) as console,
            console.signed_in("reader") as browser,
            events(browser, "/live/waits") as found,
        ):
            page = await until(found, lambda _, text: "1 deadlock" in text)
            assert "test_waits" not in page
            listed = await get(console, "/deadlocks")
            ((one, two),) = [each["tasks"] for each in listed["deadlocks"]]
            assert {one["name"], two["name"]} == {"a", "b"}
            assert one["leases"][0]["name"] == two["name"]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_picture_and_the_list_are_bounded_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits_module, "MOST_PICTURED", 3)
    monkeypatch.setattr(views, "MOST_PICTURED", 3)
    monkeypatch.setattr(views, "MOST_TASKS", 5)
    async with served() as console, console.signed_in("reader") as browser:
        planted = Planted(console.store)
        await planted.program("root.py", "root")
        for number in range(7):
            session = await planted.program(f"p{number}.py", f"own-{number}")
            await planted.wait(session, "root", [f"own-{number}"])
        await planted.deadlock("a", "b")
        await observed(console)
        page = (await browser.get("/waits")).text
        shown = labels(picture_of(page))
        assert [each.split()[0] for each in shown] == ["a.py", "b.py", "p0.py", "root.py"]
        assert "The picture shows 3 tasks; 6 are left out." in page
        assert "The list shows 5 tasks; 4 are left out." in page
        assert page.count("<tr id=") == 5 + 1


async def test_a_part_of_the_waits_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TASKS", "QUEUE"):
        async with served() as console, console.signed_in("reader") as browser:
            planted = Planted(console.store)
            await planted.program("root.py", "root")
            for number in range(4):
                session = await planted.program(f"p{number}.py", f"own-{number}")
                await planted.wait(session, "root", [f"own-{number}"])
            await observed(console)
            assert "Not everything was read" not in (await browser.get("/waits")).text
            with monkeypatch.context() as patch:
                patch.setattr(reading, name, 3)
                await observed(console)
                page = (await browser.get("/waits")).text
                assert "Not everything was read" in page
                assert "3 tasks wait, no deadlock" in page


async def test_a_store_that_does_not_show_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(MemoryEngine.capabilities, waiter_order=False)
    monkeypatch.setattr(MemoryEngine, "capabilities", found)
    async with served() as console, console.signed_in("reader") as browser:
        await observed(console)
        page = await browser.get("/waits")
        assert page.status_code == 200
        assert "does not show which task waits for which" in page.text
        for path, query in (("/waits", {}), ("/deadlocks", {}), ("/why", {"name": "a"})):
            assert await get(console, path, **query) == (501, "Unsupported")


async def test_without_pages_a_store_is_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryEngine, "pages", lambda self: None)
    async with served() as console, console.signed_in("reader") as browser:
        planted = Planted(console.store)
        await planted.deadlock("a", "b")
        await observed(console)
        page = (await browser.get("/waits")).text
        assert "1 deadlock" in page
        assert page.count(">attached<") == 2
        for _ in range(4):
            await planted.program("plain.py", "a")
        monkeypatch.setattr(reading, "QUEUE", 3)
        await observed(console)
        page = (await browser.get("/waits")).text
        assert "Not everything was read" in page  # the queue of `a` would be long
        assert "no deadlock" in page


async def test_sessions_far_apart_are_read_in_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SESSION_PAGE", 2)
    monkeypatch.setattr(reading, "SESSION_PAGES", 2)
    async with served() as console:
        sessions = [await attached(console.store) for _ in range(9)]
        wanted = [sessions[at].id for at in (0, 1, 5, 8)]
        found = await reading._read_sessions(console.store, "/default", wanted)
        assert set(wanted[:3]) <= set(found)
        assert wanted[3] not in found


async def test_a_task_behind_a_larger_request_waits_for_it() -> None:
    async with served() as console:
        planted = Planted(console.store)
        holder = await planted.program("holder.py")
        await holder.create_semaphore("gpu", 2, b"", exist_ok=False)
        await planted.request(holder, "gpu", 1)
        large = await planted.program("large.py")
        await planted.wait(large, "gpu", tokens=2)
        small = await planted.program("small.py", "own")
        await planted.wait(small, "gpu", ["own"], tokens=1)
        found = await reading.read_waits(console.store, "/default")
        first, second = found.tasks
        assert (first.program, second.program) == ("large.py", "small.py")
        assert [found.parties[key].program for key in first.awaited] == ["holder.py"]
        assert second.awaited == (first.key,)
        (root,) = found.holders
        assert root.program == "holder.py"


async def test_each_holder_appears_once_and_many_are_counted() -> None:
    async with served() as console:
        planted = Planted(console.store)
        holders = [await planted.program(f"h{number}.py") for number in range(12)]
        await holders[0].create_semaphore("gpu", 12, b"", exist_ok=False)
        for each in holders:
            await planted.request(each, "gpu", 1)
        await planted.request(holders[0], "disk")
        for name in ("gpu", "disk"):
            program = await planted.program(f"{name}.py", f"own-{name}")
            tokens = 1 if name == "gpu" else EPHEMERAL_LIMIT
            await planted.wait(program, name, [f"own-{name}"], tokens=tokens)
        found = await reading.read_waits(console.store, "/default", first=["gpu"])
        many, one = found.tasks
        assert (len(many.awaited), many.more) == (8, 4)
        (root,) = [found.parties[key] for key in one.awaited]
        assert root.names == ("gpu", "disk")
        (*_, last) = found.chain("gpu")
        assert (len(found.chain("gpu")), last.more) == (8, 4)


async def test_a_task_that_waits_for_itself_is_a_deadlock_of_one() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        await Planted(console.store).deadlock("a")
        await observed(console)
        page = (await browser.get("/waits")).text
        assert "Deadlock: 1 task waits for itself" in plain(page)
        assert len(picture_of(page).findall("path")) == 2


# Permissions, and what is left out


async def test_a_visitor_sees_only_the_waits_that_it_may_read() -> None:
    async with served() as console:
        await console.store.create_node("/billing", NodeConfig(), exist_ok=False)
        await Planted(console.store, "/billing").deadlock("secret-a", "secret-b")
        await observed(console)
        async with console.signed_in("reader") as browser:
            for path in ("/", "/waits"):
                page = await browser.get(path)
                assert page.status_code == 200
                assert "secret" not in page.text
                assert "Deadlock" not in page.text
            assert (await browser.get("/waits?node=/billing")).status_code == 404
        for path, query in (("/waits", {}), ("/deadlocks", {}), ("/why", {"name": "secret-a"})):
            where: dict[str, Any] = {"node": "/billing", **query}
            assert await get(console, path, **where) == (404, "NodeNotFound")
        assert (await get(console, "/deadlocks"))["deadlocks"] == []
        async with console.signed_in("billing") as browser:
            assert "secret-a" in (await browser.get("/waits")).text
            assert (await browser.get("/waits?node=/default")).status_code == 403
        (found,) = (await get(console, "/deadlocks", "billing"))["deadlocks"]
        assert (found["node"], len(found["tasks"])) == ("/billing", 2)


async def test_the_publications_are_no_semaphore_of_the_lists() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        await enqueue(await attached(console.store), 1, "before")
        await observed(console)
        await Planted(console.store).deadlock("a", "b")
        await observed(console)
        for path in ("/", "/semaphores", "/semaphores?search=tenure", "/timelines", "/events"):
            assert WAITS not in (await browser.get(path)).text, path
        listed = await get(console, "/semaphores")
        assert [each["name"] for each in listed["semaphores"]] == ["a", "b", "before"]
        store = await get(console, "/store")
        assert (store["semaphores"], store["held"]) == (3, 3)
        assert WAITS not in [each["name"] for each in (await get(console, "/events"))["events"]]


# Hostile programs


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "\u202eevil\u202c txt",
        "line\r\nSet-Cookie: a=b",
        "\x00\x1b[2J",
        "{{ 7 * 7 }}",
        "漢" * 300,
    ],
)
async def test_hostile_names_are_only_text(text: str) -> None:
    async with served() as console, console.signed_in("admin") as browser:
        planted = Planted(console.store)
        one = await attached(console.store, text=text)
        two = await attached(console.store, text=f"[host=db program={text[:200]}]")
        names = text, text[:200] + "2"
        for session, name in zip((one, two), names, strict=True):
            await planted.request(session, name)
        await planted.wait(one, names[1], [names[0]], task=text)
        await planted.wait(two, names[0], [names[1]], task=text)
        await observed(console)
        page = await browser.get("/waits")
        assert page.status_code == 200
        assert "1 deadlock" in page.text
        assert not re.search(
            r"<script>alert|<img|[\u202e\x00\x1b]|>49<", page.text.split("</form>")[2]
        )
        assert len(labels(picture_of(page.text))) == 2
        why = await browser.get("/semaphore", params={"name": text})
        assert "Why does it wait" in why.text
        found = await get(console, "/why", name=text)
        assert [each["task"] for each in found["tasks"]] == [text[:80]] * 2


async def test_false_publications_show_nothing() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        planted = Planted(console.store)
        holder = await planted.program("holder.py", "a")
        liar = await planted.program("liar.py", "b", "a")
        (mine,), (other,) = [await planted.order_ids(each, "a") for each in (liar, holder)]
        stranger = await planted.program("stranger.py", host="web-1")
        for session, data in (
            (stranger, encode("a", mine, [], task="t", timeout=False, raises=False)),  # not its own
            (liar, encode("a", other, [], task="t", timeout=False, raises=False)),  # does not wait
            (liar, encode("none", mine, [], task="t", timeout=False, raises=False)),
            (liar, encode("\ud800", mine, [], task="t", timeout=False, raises=False)),
            (liar, b"[" * 4000),
            (liar, b"\xff" * 100_000),
        ):
            await planted.publish(session, data)
        await observed(console)
        assert "No task waits" in (await browser.get("/waits")).text
        # The request of another program in the publication is no lease of the task.
        data = encode("a", mine, [("a", other)], task="\ud800", timeout=False, raises=False)
        await planted.publish(liar, data)
        await observed(console)
        page = (await browser.get("/waits")).text
        assert "1 task waits, no deadlock" in page
        (waiting,) = (await get(console, "/waits"))["tasks"]
        assert (waiting["leases"], waiting["task"]) == ([], "?")


async def test_a_name_that_no_store_has_does_not_stop_the_observer() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        for name in ("", "x" * 2000, "\x00"):
            await browser.get("/semaphore", params={"name": name})
        await observed(console)
        assert console.console.observer.trouble is None


# The API


async def test_the_api_returns_the_graph() -> None:
    async with served() as console:
        planted = Planted(console.store)
        root = await planted.program("import.py", "ledger", host="web-3")
        middle = await planted.program("billing.py", "invoices")
        await planted.wait(middle, "ledger", ["invoices"])
        await planted.program("plain.py", "invoices")
        await planted.deadlock("a", "b")
        await observed(console)

        graph = await get(console, "/waits")
        assert (graph["node"], graph["complete"], graph["deadlocks"]) == ("/default", True, 1)
        one, two, billing = graph["tasks"]
        assert (one["deadlock"], two["deadlock"], billing["deadlock"]) == (1, 1, None)
        assert one["awaited"] == [{"session_id": two["session_id"], "order_id": two["order_id"]}]
        assert billing["awaited"] == [{"session_id": root.id, "order_id": None}]
        assert (billing["program"], billing["name"], billing["attached"]) == (
            *("billing.py", "ledger", True),
        )
        (holder,) = graph["holders"]
        assert (holder["program"], holder["host"]) == ("import.py", "web-3")
        assert [each["name"] for each in holder["leases"]] == ["ledger"]

        why = await get(console, "/why", name="invoices")
        assert [each["program"] for each in why["owners"]] == ["billing.py"]
        assert [each["program"] for each in why["waiters"]] == ["plain.py"]
        assert [each["program"] for each in why["tasks"]] == ["billing.py"]
        assert [each["program"] for each in why["holders"]] == ["import.py"]
        assert why["deadlocks"] == 0
        assert await get(console, "/why", name="none") == (404, "SemaphoreNotFound")
        assert await get(console, "/why", name="x" * 2000) == (400, "InvalidArgument")
        assert await get(console, "/waits", node="/none") == (404, "NodeNotFound")

        (found,) = (await get(console, "/deadlocks"))["deadlocks"]
        assert [each["program"] for each in found["tasks"]] == ["a.py", "b.py"]
        (again,) = (await get(console, "/deadlocks", node="/default"))["deadlocks"]
        # The times differ, if the observer has read the node in between.
        assert [each["order_id"] for each in again["tasks"]] == [
            each["order_id"] for each in found["tasks"]
        ]


async def test_a_node_that_is_not_read_yet_has_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(observer: Observer, path: str) -> None:
        pass

    monkeypatch.setattr(Observer, "_waits", nothing)
    async with served() as console, console.signed_in("reader") as browser:
        await Planted(console.store).deadlock("a", "b")
        await observed(console)
        assert "has not been read yet" in (await browser.get("/waits")).text
        found = await get(console, "/waits")
        assert (found["tasks"], found["complete"]) == ([], False)
        assert await get(console, "/deadlocks") == {"deadlocks": [], "complete": False}
        assert await get(console, "/deadlocks", node="/default") == {
            "deadlocks": [],
            "complete": False,
        }
        assert len((await get(console, "/why", name="a"))["tasks"]) == 2  # it is read for the call


# The picture


NODES = st.integers(0, 12).flatmap(
    lambda most: st.lists(
        st.lists(st.integers(0, 12).map(str), max_size=3), min_size=most, max_size=most
    )
)


@given(NODES)
def test_boxes_do_not_overlap_and_arrows_lead_to_the_right(targets: list[list[str]]) -> None:
    nodes = [GraphNode(str(number), tuple(ends)) for number, ends in enumerate(targets)]
    picture = draw(nodes)
    boxes = {each.key: each for each in picture.boxes}
    assert list(boxes) == [each.key for each in nodes]
    for each in picture.boxes:
        assert 0 <= each.x <= picture.width - WIDTH
        assert 0 <= each.y <= picture.height - HEIGHT
        for other in picture.boxes:
            apart = abs(each.x - other.x) >= WIDTH or abs(each.y - other.y) >= HEIGHT
            assert apart or each is other
    wanted = {(node.key, end) for node in nodes for end in node.awaited if end in boxes}
    assert len(picture.arrows) == len(wanted)
    reached = {key: reach(key, wanted) for key in boxes}
    for start, end in wanted:
        if start in reached[end]:
            assert boxes[start].x == boxes[end].x
        else:
            assert boxes[start].x < boxes[end].x


def reach(key: str, arrows: set[tuple[str, str]]) -> set[str]:
    found: set[str] = set()
    left = [key]
    while left:
        at = left.pop()
        for start, end in arrows:
            if start == at and end not in found:
                found.add(end)
                left.append(end)
    return found


def test_a_long_chain_and_a_large_circle_are_drawn() -> None:
    chain = [GraphNode(str(at), (str(at + 1),)) for at in range(120)]
    assert len(draw(chain).arrows) == 119
    circle = [GraphNode(str(at), (str((at + 1) % 120),), 1) for at in range(120)]
    assert all(each.within for each in draw(circle).arrows)
    assert draw([]) == Picture(draw([]).width, draw([]).height, (), ())
