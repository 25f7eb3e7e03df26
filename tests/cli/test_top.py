"""What `tenure top` makes of keys, and draws: without a terminal. And its plain output."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from dataclasses import replace

import pytest
from rich.live import Live
from rich.text import Text

import tenure as tenure_package
from tenure import (
    NodeConfig,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    WaitGraph,
)
from tenure.cli.top import screen
from tenure.cli.top.screen import cells_of, page_of, render
from tenure.cli.top.view import (
    SORTS,
    Keyboard,
    Observer,
    Row,
    Snapshot,
    View,
    chosen,
    pressed,
    settled,
)
from tenure.cli.why import lines_of
from tests.cli.programs import HOST, Tenure, eventually

PAGE = 5
NASTY = "\x1b[2J\x9b1m\u202e\n"


def request(order_id: int, **facts: object) -> RequestDescription:
    known = {"since": 1.0, "pid": 4711, "session_description": "worker"} | facts
    return RequestDescription(1, order_id, 1, b"", **known)  # type: ignore[arg-type]


def semaphore(name: str, held: int = 0, waiting: int = 0, age: float = 1.0) -> SemaphoreDescription:
    owners = tuple(request(at, since=age) for at in range(held))
    return SemaphoreDescription(name, b"", 10, held, False, owners, (), waiting)


def snapshot_of(*rows: Row, inside: SemaphoreDescription | None = None) -> Snapshot:
    paths = sorted({row.node for row in rows} | {"/default"})
    nodes = [NodeDescription(path, NodeConfig(), 1, 1) for path in paths]
    return Snapshot("sqlite:///s.db", 0.0, 0.01, nodes, rows, inside)


SEVERAL = snapshot_of(
    Row("/billing", semaphore("a", held=1, waiting=5, age=3.0), 0.5),
    Row("/default", semaphore("b", held=3, waiting=1, age=9.0), 2.0),
    Row("/default", semaphore("c", held=2, waiting=0, age=1.0), None),
)
MANY = snapshot_of(*(Row("/default", semaphore(f"s{at:03}")) for at in range(1000)))


def after(snapshot: Snapshot, *keys: str, view: View | None = None) -> View:
    view = settled(view or View(), snapshot, PAGE)
    for key in keys:
        view = pressed(view, key, snapshot, PAGE)
    return view


def names(snapshot: Snapshot, view: View) -> str:
    return "".join(row.semaphore.name for row in chosen(snapshot, view))


# Keys


def test_the_order_goes_round_and_turns() -> None:
    orders = {"name": "abc", "held": "bca", "waiting": "abc", "age": "bac", "rate": "bac"}
    view = settled(View(), SEVERAL, PAGE)
    for sort in (*SORTS, "name"):
        assert (view.sort, names(SEVERAL, view)) == (sort, orders[sort])
        turned = pressed(view, "r", SEVERAL, PAGE)
        assert names(SEVERAL, turned) == orders[sort][::-1]
        view = pressed(view, "s", SEVERAL, PAGE)


def test_the_cursor_stays_on_what_it_is_on() -> None:
    view = after(SEVERAL, "down")
    assert view.cursor.selected == ("/default", "b")
    view = settled(replace(view, sort="held"), SEVERAL, PAGE)  # it comes first now
    assert (view.cursor.selected, view.cursor.index) == (("/default", "b"), 0)
    gone = snapshot_of(*(row for row in SEVERAL.rows if row.semaphore.name != "b"))
    view = settled(view, gone, PAGE)
    assert (view.cursor.selected, view.cursor.index) == (("/default", "c"), 0)
    assert settled(view, snapshot_of(), PAGE).cursor.selected is None


def test_a_cursor_that_was_not_moved_stays_at_the_top() -> None:
    view = settled(View(), SEVERAL, PAGE)
    assert (view.cursor.selected, view.cursor.index) == (None, 0)
    assert settled(replace(view, reverse=True), SEVERAL, PAGE).cursor.index == 0
    assert after(SEVERAL, "enter", view=view).inside == ("/billing", "a")
    for key in ("s", "r", "n"):
        assert after(SEVERAL, "down", key).cursor.selected is None


@pytest.mark.parametrize(
    ("keys", "index", "first"),
    [
        (["up"], 0, 0),
        (["j"] * 4, 4, 0),
        (["down"] * 5, 5, 1),
        (["pagedown"] * 2, 10, 6),
        (["end"], 999, 995),
        (["end", "down"], 999, 995),
        (["end", "pageup"], 994, 994),
        (["end", "k", "home"], 0, 0),
    ],
)
def test_the_rows_scroll_with_the_cursor(keys: list[str], index: int, first: int) -> None:
    cursor = after(MANY, *keys).cursor
    assert (cursor.index, cursor.first, cursor.selected) == (
        index,
        first,
        ("/default", f"s{index:03}"),
    )


def test_nodes_are_gone_through_and_a_dropped_one_is_left() -> None:
    view = after(SEVERAL, "n")
    assert (view.node, names(SEVERAL, view)) == ("/billing", "a")
    view = after(SEVERAL, "n", view=view)
    assert (view.node, names(SEVERAL, view)) == ("/default", "bc")
    assert after(SEVERAL, "n", view=view).node is None
    assert after(SEVERAL, "escape", view=view).node is None
    assert settled(replace(view, node="/gone"), SEVERAL, PAGE).node is None


def test_one_is_looked_into_and_left() -> None:
    view = after(SEVERAL, "down", "enter")
    assert view.inside == ("/default", "b")
    assert after(SEVERAL, "s", "n", "r", "x", "w", view=view) == view
    owners = replace(SEVERAL, inside=semaphore("b", held=9))
    assert after(owners, "end", view=view).request.first == 4
    for key in ("escape", "backspace"):
        left = after(SEVERAL, key, view=view)
        assert (left.inside, left.cursor.selected) == (None, ("/default", "b"))
    assert after(view=view, snapshot=SEVERAL).quit is False
    assert after(SEVERAL, "q", view=view).quit
    assert after(snapshot_of(), "enter").inside is None


WAITERS = tuple(request(at) for at in range(1, 9))
QUEUE = replace(semaphore("b", held=1), waiters=WAITERS)
GRAPH = WaitGraph("/default", "b", (QUEUE,))
EXPLAINED = replace(SEVERAL, inside=QUEUE, graph=GRAPH)


def test_the_reason_is_looked_at_and_left() -> None:
    view = after(SEVERAL, "down", "w")
    assert (view.inside, view.explained) == (None, (("/default", "b"), None))
    assert after(SEVERAL, "end", view=view).line == 0
    assert after(EXPLAINED, "end", view=view).line == len(list(lines_of(GRAPH))) - PAGE
    for key in ("escape", "backspace", "w"):
        left = after(SEVERAL, key, view=view)
        assert (left.inside, left.explained) == (None, None)
        assert left.cursor.selected == ("/default", "b")
    lines = [line.plain for line in render(EXPLAINED, view, 100, 20)]
    assert lines[0] == "b  on /default: why its waiters wait"
    assert lines[2] == "b  semaphore on /default, 1 of 10, 8 waiting"
    assert lines[3].startswith("1. waits for 1.0 s: worker")
    assert "scroll" in lines[-1]
    assert "no holder" in render(SEVERAL, view, 100, 20)[1].plain
    assert "no holder" not in render(SEVERAL, view, 100, 20, note="not up to date")[1].plain
    other = replace(EXPLAINED, graph=replace(GRAPH, name="c"))  # of the screen before
    assert "waits" not in render(other, view, 100, 20)[2].plain


def test_a_request_is_selected_and_followed() -> None:
    view = after(EXPLAINED, view=after(SEVERAL, "down", "enter"))
    assert view.request.selected is None
    view = after(EXPLAINED, "down", "j", "k", "down", view=view)
    assert (view.request.selected, view.request.index) == (2, 2)
    shorter = replace(EXPLAINED, inside=replace(QUEUE, waiters=WAITERS[1:]))
    view = settled(view, shorter, PAGE)
    assert (view.request.selected, view.request.index) == (2, 1)
    view = settled(view, replace(shorter, inside=None), PAGE)  # not read
    assert view.request.selected == 2
    gone = replace(EXPLAINED, inside=replace(QUEUE, waiters=WAITERS[2:]))
    assert settled(view, gone, PAGE).request.selected == 3
    lines = render(EXPLAINED, settled(view, EXPLAINED, PAGE), 100, 20)
    (reversed_line,) = [line for line in lines[:-1] if "reverse" in str(line.spans)]
    assert reversed_line.plain.split()[:2] == ["waits", "2"]
    assert "select" in lines[-1].plain


def test_a_request_is_explained_and_left_with_the_cursor_where_it_was() -> None:
    inside = after(EXPLAINED, *8 * ["down"], view=after(SEVERAL, "down", "enter"))
    assert (inside.request.index, inside.request.first) == (8, 4)
    view = after(EXPLAINED, "w", view=inside)
    assert view.explained == (("/default", "b"), 8)
    lines = [line.plain for line in render(EXPLAINED, view, 100, 20)]
    assert lines[0] == "b  on /default: request 8"
    assert "place 8 of 8" in lines[3]
    assert after(EXPLAINED, "end", view=view).line > 0
    for key in ("escape", "backspace", "w"):
        assert after(EXPLAINED, "down", key, view=view).request == inside.request
    assert after(EXPLAINED, "escape", "escape", view=view).inside is None
    holder = after(EXPLAINED, "home", "w", view=inside)
    lines = [line.plain for line in render(EXPLAINED, holder, 100, 20)]
    assert lines[3].startswith("held for 1.0 s by worker")
    gone = replace(EXPLAINED, graph=replace(GRAPH, semaphores=(semaphore("b"),)))
    assert render(gone, view, 100, 20)[3].plain == "request 8 has left the queue"


def test_keys_come_whole_or_in_pieces() -> None:
    keyboard = Keyboard()
    assert keyboard.feed(b"qj\x1b[A\x1bOB\r\x7f\x1b[5~") == [
        *("q", "j", "up", "down", "enter", "backspace", "pageup")
    ]
    for piece in (b"\x1b", b"["):
        assert keyboard.feed(piece) == []
        assert keyboard.waiting
    assert keyboard.feed(b"B") == ["down"]
    assert keyboard.feed(b"\x1b") == []
    assert keyboard.flush() == ["escape"]
    assert keyboard.flush() == []
    assert keyboard.feed(b"\x1bq") == ["escape", "q"]
    assert keyboard.feed(b"\x1b[99;5u\x1b[1;5A") == []  # not known: not half understood either
    assert keyboard.feed(b"\x1b[" + b"1;" * 20) == []  # no terminal says that
    assert not keyboard.waiting


# Lines


@pytest.mark.parametrize("width", [1, 5, 20, 80, 300])
@pytest.mark.parametrize("height", [1, 2, 4, 24, 60])
@pytest.mark.parametrize("inside", [False, True])
def test_the_lines_fit_any_screen(width: int, height: int, inside: bool) -> None:
    view = View(inside=("/default", "s001")) if inside else View()
    snapshot = replace(MANY, inside=semaphore("s001", held=9)) if inside else MANY
    for shown in (snapshot, snapshot_of()):
        fitting = settled(view, shown, page_of(height))
        lines = render(shown, fitting, width, height)
        assert len(lines) == height
        assert all(line.cell_len <= width for line in lines)


def test_what_others_wrote_is_escaped() -> None:
    owner = RequestDescription(
        1, 7, 1, NASTY.encode() + b"\xff", since=1.0, session_description=NASTY
    )
    nasty = SemaphoreDescription(NASTY, NASTY.encode(), 3, 1, False, (owner,), (owner,), 1)
    snapshot = replace(snapshot_of(Row("/default", nasty)), inside=nasty, url=NASTY)
    for view in (View(), View(inside=("/default", NASTY))):
        lines = render(snapshot, settled(view, snapshot, 20), 300, 20, note=NASTY)
        shown = "\n".join(line.plain for line in lines)
        assert shown.replace("\n", "").isprintable()
        assert r"\x1b[2J\x9b1m\u202e\n" in shown


def test_only_what_is_visible_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def counted(row: Row) -> list[str]:
        drawn.append(row.key)
        return cells_of(row)

    monkeypatch.setattr("tenure.cli.top.screen.cells_of", counted)
    render(MANY, after(MANY, "end"), 80, 24)
    assert 0 < len(drawn) <= 24


def test_one_shows_its_owners_and_waiters_in_order() -> None:
    there = SemaphoreDescription(
        "gpu", b"", 3, 2, False, (request(7), request(8)), (request(9, timeout=60.0),), 1
    )
    snapshot = replace(snapshot_of(Row("/default", there)), inside=there)
    lines = [line.plain for line in render(snapshot, View(inside=("/default", "gpu")), 100, 20)]
    assert lines[0] == "gpu  semaphore on /default"
    assert lines[1] == "2 of 3, 1 waiting"
    assert [line.split()[:2] for line in lines[3:6]] == [
        ["owns", "7"],
        ["owns", "8"],
        ["waits", "9"],
    ]
    assert "1 min" in lines[5]


# Readings


async def test_new_owners_are_counted_from_one_reading_to_the_next() -> None:
    async with tenure_package.connect("memory://") as client:
        observer = Observer(client, None)
        async with client.session() as session:
            pool = session.semaphore("pool")
            await pool.create(5)
            first = await pool.acquire()
            assert (await observer.read()).rows[0].rate is None
            _second = await pool.acquire(data=b"second")
            await first.release()
            looked_into = await observer.read(("/default", "pool"))
            assert looked_into.inside is not None
            assert [each.data for each in looked_into.inside.owners] == [b"second"]
            assert looked_into.rows[0].rate is None  # those of the last reading
            (row,) = (await observer.read()).rows
            assert row.rate is not None
            assert row.rate > 0
            (row,) = (await observer.read()).rows
            assert row.rate == 0
            inside = (await observer.read(("/default", "gone"))).inside
            assert inside is None
    assert row.key == ("/default", "pool")


async def test_the_longest_wait_is_read_unless_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tenure_package.connect("memory://") as client, client.session() as session:
        observer = Observer(client, None)
        async with session.mutex("m").lock(), session.mutex("m").enqueue():
            (row,) = (await observer.read()).rows
            assert row.longest is not None
            assert row.longest >= 0
            explained = await observer.read(None, row.key)
            assert explained.graph is not None
            assert explained.inside is explained.graph.semaphores[0]
            assert len(explained.graph.waiters) == 1
            monkeypatch.setattr("tenure.cli.top.view.MOST_WAITERS", 0)
            (row,) = (await observer.read()).rows
            assert (row.longest, row.semaphore.waiting) == (None, 1)
        assert (await observer.read(row.key, row.key)).graph is None


# Without a terminal


def test_once_is_one_table(tenure: Tenure) -> None:
    holder = tenure.hold()
    tenure.start("run", "--lock", "nightly", "--", "true")
    eventually(lambda: tenure.waiting() == 1)
    lines = tenure.inside("top", "--once").stdout.strip().splitlines()
    assert len(lines) == 3
    assert re.search(
        r"^[\d:]{8}  1 owner, 1 waiting \(longest .+ s\); 1 semaphore, 2 sessions, 1 node$",
        lines[0],
    )
    assert lines[1].split()[4:] == [
        "WAITING",
        "LONGEST",
        *"NEW/S SINCE HOST PROGRAM PROCESS DATA".split(),
    ]
    assert re.search(
        rf" 1 +\d\.\d s +\d\.\d s  {HOST} +tenure run sh +{holder.process.pid}$", lines[2]
    )
    (node,) = tenure.json("top", "--once")["nodes"]
    assert 0 <= node["semaphores"][0]["longest_wait"] < 60


def test_a_pipe_gets_a_table_for_each_reading(tenure: Tenure) -> None:
    tenure.hold("--data", "me")
    done = tenure("top", "--iterations", "2", "--interval", "0.1")
    assert done.returncode == 0
    one, other = done.stdout.strip().split("\n\n")
    for each in (one, other):
        assert each.splitlines()[1].split()[:4] == ["NAME", "NODE", "KIND", "HELD"]
        assert each.splitlines()[2].split()[:4] == ["nightly", "/default", "mutex", "held"]
    assert "\x1b" not in done.stdout


def test_a_script_gets_an_object_for_each_reading(tenure: Tenure) -> None:
    tenure.hold()
    tenure.inside("node", "create", "/billing")
    running = tenure.start("top", "--json", "--iterations", "2", "--interval", "0.1")
    first, second = json.loads(running.line()), json.loads(running.line())
    assert running.end() == (0, "")
    assert [each["path"] for each in first["nodes"]] == ["/billing", "/default"]
    assert first["nodes"][1]["semaphores"][0]["new_owners_per_second"] is None
    assert second["nodes"][1]["semaphores"][0]["new_owners_per_second"] == 0
    assert second["time"] > first["time"]
    (only,) = tenure.json("top", "--iterations", "1", "--node", "/billing")["nodes"]
    assert only["path"] == "/billing"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--interval", "0"], 78, "--interval is 0.1 or more"),
        (["--interval", "often"], 78, "'often' is not a number of seconds"),
        (["--iterations", "0"], 78, "one or more"),
        (["--node", "/defualt"], 73, "did you mean /default?"),
        (["--url", "sqlite:///nowhere.db"], 74, "nowhere.db yet"),
        (["--url", "memory://"], 78, "memory of one process"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    tenure.inside("node", "create", "/other")
    done = tenure.inside("top", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "Name Held Waiting Since Host Program"),
        (120, "Name Kind Held Waiting Longest New/s Since Host Program Process"),
        (200, "Name Kind Held Waiting Longest New/s Since Host Program Process Data"),
    ],
)
def test_the_host_and_the_program_of_the_owner_are_shown_on_any_terminal(
    width: int, shown: str
) -> None:
    owner = request(
        1795367972252788,
        host="worker-7.example.org",
        program="backup.py",
        since=792.0,
        session_description="tenure run backup.sh",
    )
    waiter = request(1795367972252789, since=733.0)
    held = SemaphoreDescription("nightly-backup", b"x" * 70, 4, 3, False, (owner,), (waiter,), 12)
    alone = snapshot_of(Row("/default", held, 0.5))
    lines = [line.plain for line in render(alone, settled(View(), alone, PAGE), width, 10)]
    assert lines[2].split() == shown.split()
    assert "worker-7" in lines[3]
    assert "backup.py" in lines[3]
    totals = "1 owner, 12 waiting (longest 12 min 13 s), 0.5 new/s; 1 semaphore, 1 session, 1 node"
    assert lines[1] == (totals if width > 80 else totals[:79] + "…")


def test_the_totals_are_those_of_the_nodes_shown() -> None:
    view = after(SEVERAL, "n")
    assert render(SEVERAL, view, 100, 20)[1].plain == (
        "/billing: 1 owner, 5 waiting, 0.5 new/s; 1 semaphore, 1 session"
    )
    assert render(SEVERAL, after(SEVERAL), 100, 20)[1].plain == (
        "6 owners, 6 waiting, 2.5 new/s; 3 semaphores, 2 sessions, 2 nodes"
    )


def test_a_client_without_a_program_is_shown_by_its_description_or_session() -> None:
    for facts, shown in (
        ({"program": "a.py", "session_description": "worker"}, "a.py (worker)"),
        ({"program": "a.py", "session_description": "run a.py"}, "a.py (run a.py)"),
        ({"session_description": "from 10.0.0.7"}, "from 10.0.0.7"),
        ({"session_description": None}, "session 1"),
    ):
        described = replace(semaphore("a", held=1), owners=(request(1, **facts),))
        assert cells_of(Row("/default", described))[9] == shown


def test_long_tokens_are_shortened_to_what_tells_them_apart() -> None:
    first, second = request(1795367972252788), request(1795367972310021)
    inside = replace(semaphore("nightly", held=1), owners=(first,), waiters=(second,))
    view = View(inside=("/default", "nightly"))
    lines = [line.plain for line in render(replace(SEVERAL, inside=inside), view, 120, 10)]
    assert "tokens 1795367972…" in lines[1]
    assert [line.split()[1] for line in lines[3:5]] == ["…252788", "…310021"]


async def test_a_drawing_on_a_closed_terminal_ends_it_as_its_hangup_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ended: list[int] = []
    monkeypatch.setattr(screen, "_keyboard", lambda: None)
    with screen.Screen(lambda _: None, lambda: None, ended.append) as shown:
        monkeypatch.setattr(Live, "update", gone)
        shown.show([Text("held")])
    assert ended == [signal.SIGHUP]
