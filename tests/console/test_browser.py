"""The console in Chromium: every page, live updates, accessibility, hostile names.

`make test-browser` installs what these tests need. With SCREENSHOTS, the path of a folder,
they leave pictures of the pages there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.model import NodeConfig
from tests.console.planting import Planted
from tests.console.serving import (
    Served,
    attached,
    enqueue,
    observed,
    served,
    token_of,
    until_streams_end,
)

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), "")
MISSING = [each for each in ("playwright", "axe_playwright_python") if find_spec(each) is None]
MISSING += [] if CHROMIUM else ["Chromium"]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.no_debug,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: run `make test-browser`, which installs it"
    ),
]

PAGES = ["/", "/semaphores", "/semaphore?name=nightly", "/sessions", "/waits", "/timelines"]
PAGES += ["/events"]
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}
PATIENCE = 60_000  # milliseconds


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=root)
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """A browser at a console, whose errors are noted."""

    def __init__(self, context: Any, page: Any, console: Served) -> None:
        self.context = context
        self.page = page
        self.console = console
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        page.set_default_timeout(PATIENCE)

    def _note(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.errors.append(message.text)

    async def go(self, path: str) -> None:
        await self.page.goto(self.console.url + path)

    async def live(self) -> None:
        """Wait until the page has been updated."""
        await self.text("#liveness", "Live")

    async def text(self, selector: str, wanted: str) -> None:
        """Wait until an element contains a text."""
        await self.page.wait_for_function(
            "([selector, wanted]) =>"
            " document.querySelector(selector)?.textContent.includes(wanted)",
            arg=[selector, wanted],
        )


@asynccontextmanager
async def visiting(
    console: Served, browser: Any, who: str = "admin", **options: Any
) -> AsyncIterator[Visit]:
    """Sign in with the form, as a person does."""
    context = await browser.new_context(**({"viewport": DESK} | options))
    try:
        visit = Visit(context, await context.new_page(), console)
        await visit.go("/")
        await visit.page.get_by_label("Token").fill(token_of(who))
        await visit.page.get_by_role("button", name="Sign in").click()
        await visit.page.wait_for_url(console.url + "/")
        yield visit
        assert visit.errors == []
    finally:
        await context.close()


@asynccontextmanager
async def busy() -> AsyncIterator[tuple[Served, Any]]:
    """A console with something on each page, and a browser."""
    async with served() as console, chromium() as browser:
        await fill(console.store)
        await observed(console)
        yield console, browser


async def fill(store: Engine) -> None:
    await store.create_node("/billing", NodeConfig(), exist_ok=False)
    names = ("backup.py", "report.py", "import.py", "cleanup.py")
    workers = [
        await attached(store, text=f"night shift [host=db-{number} pid=420{number} program={name}]")
        for number, name in enumerate(names, start=1)
    ]
    for worker in workers:
        await enqueue(worker, 1, "nightly", data=f"host {worker.id}".encode())
    await workers[0].create_semaphore("gpu", 4, b"", exist_ok=False)
    await workers[0].create_semaphore("limits", 1, b'{"requests": 100}', exist_ok=False)
    await workers[0].create_semaphore("scheduler", 1, b"", exist_ok=False)
    for worker in workers[:3]:
        await enqueue(worker, 2, "gpu", count=1, data=b"training", ephemeral=False)
    await enqueue(workers[3], 3, "scheduler", count=1, data=b"10.0.0.7:80", ephemeral=False)
    await enqueue(workers[2], 4, "apis", count=1, data=b"10.0.0.8:80")
    planted = Planted(store)
    await planted.deadlock("account-1", "account-2")
    await planted.program("ledger.py", "ledger")
    for name in ("invoices", "reports"):
        program = await planted.program(f"{name}.py", name)
        await planted.wait(program, "ledger", [name])


async def picture(page: Any, name: str) -> None:
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        await page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


async def problems(page: Any) -> list[str]:
    """What axe finds."""
    from axe_playwright_python.async_playwright import Axe

    found = await Axe().run(page)
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes'][:3]]}"
        for each in found.response["violations"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_is_accessible_and_fits(scheme: str) -> None:
    async with busy() as (console, browser):
        async with visiting(console, browser, color_scheme=scheme) as visit:
            page = visit.page
            (session, *_) = await console.store.list_sessions("/default")
            described = await console.store.describe_semaphore(
                "/default", "nightly", owners=True, waiters=False
            )
            confirmations = [
                f"/end-session?node=/default&session={session.id}",
                f"/evict?node=/default&name=nightly&order_id={described.owners[0].order_id}",
            ]
            for path in PAGES + confirmations:
                await visit.go(path)
                if path in PAGES:
                    await visit.live()
                assert await problems(page) == [], path
                name = re.sub(r"\W+", "-", path.partition("?")[0]).strip("-") or "overview"
                await picture(page, f"{name}-{scheme}")
                await page.set_viewport_size(PHONE)
                wide = await page.evaluate(
                    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
                assert wide <= 0, path
                await picture(page, f"{name}-{scheme}-narrow")
                await page.set_viewport_size(DESK)
            await visit.go("/semaphore?name=none&node=/none")
            assert await problems(page) == []
            assert visit.errors.pop().startswith("Failed to load resource: the server responded")
        async with visiting(console, browser, color_scheme=scheme) as visit:
            await visit.page.get_by_role("button", name="Sign out").click()
            await visit.page.wait_for_url("**/sign-in")
            assert await problems(visit.page) == []
            await picture(visit.page, f"sign-in-{scheme}")


async def test_a_page_follows_the_store_and_keeps_the_focus() -> None:
    async with busy() as (console, browser), visiting(console, browser) as visit:
        page = visit.page
        await visit.go("/semaphore?name=nightly")
        await visit.live()
        await visit.text(".summary", "Held, 3 waiters")
        button = page.locator("[aria-labelledby=h-waiters] a.button").nth(2)
        await button.focus()
        focused = await button.get_attribute("href")
        newcomer = await attached(console.store, text="newcomer")
        await enqueue(newcomer, 1, "nightly")
        await visit.text(".summary", "Held, 4 waiters")
        await visit.text("#content", "newcomer")
        await visit.text("#in-why", "is held by")
        holder, *_ = await console.store.list_sessions("/default")
        await console.store.end_session("/default", holder.id)
        await visit.text(".summary", "Held, 3 waiters")
        await visit.text(".events", "granted")
        assert await page.evaluate("document.activeElement.getAttribute('href')") == focused
        # The picture moves with time.
        width = "document.querySelector('.timeline rect.held').getAttribute('width')"
        await page.wait_for_function(
            f"before => {width} !== before", arg=await page.evaluate(width)
        )


async def test_what_disappears_above_the_focus_does_not_take_it() -> None:
    """A note without an id, which the page of a free mutex has alone."""
    async with busy() as (console, browser), visiting(console, browser) as visit:
        await visit.go("/semaphore?name=free")
        await visit.live()
        await visit.text(".note", "A mutex exists in the store only while")
        link = visit.page.locator("#in-time .windows a").first
        await link.focus()
        focused = await link.get_attribute("href")
        await enqueue(await attached(console.store), 1, "free")
        await visit.text(".summary", "Held, no waiters")
        assert await visit.page.locator(".note").count() == 0
        now = await visit.page.evaluate("document.activeElement.getAttribute('href')")
        assert now == focused


async def test_a_page_can_be_paused() -> None:
    async with busy() as (console, browser), visiting(console, browser) as visit:
        await visit.go("/semaphore?name=nightly")
        await visit.live()
        await visit.page.get_by_role("button", name="Pause").click()
        await visit.text("#liveness", "Paused")
        await until_streams_end(console)
        await enqueue(await attached(console.store), 1, "nightly")
        assert "3 waiters" in await visit.page.inner_text(".summary")
        await visit.page.get_by_role("button", name="Continue").click()
        await visit.text(".summary", "4 waiters")


async def test_a_keyboard_is_enough_to_end_a_session() -> None:
    async with busy() as (console, browser), visiting(console, browser) as visit:
        page = visit.page
        await visit.go("/sessions?search=backup")
        await visit.live()
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Skip to the content"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        for _ in range(20):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.textContent.startsWith('End ')"):
                break
        await page.keyboard.press("Enter")
        await page.wait_for_url(re.compile("/end-session"))
        before = len(await console.store.list_sessions("/default"))
        await page.get_by_role("button", name="End the session").focus()
        await page.keyboard.press("Enter")
        await page.wait_for_url(re.compile("/sessions.*done="))
        await visit.text("#content", "The session was ended.")
        assert len(await console.store.list_sessions("/default")) == before - 1
        assert console.door.acts[0]["event"] == "session ended"


async def test_a_reader_has_no_buttons() -> None:
    async with busy() as (console, browser), visiting(console, browser, "reader") as visit:
        for path in PAGES:
            await visit.go(path)
            await visit.live()
            assert await visit.page.locator("a.button, button.danger").count() == 0


async def test_a_page_of_another_site_can_do_nothing() -> None:
    async with busy() as (console, browser), visiting(console, browser) as visit:
        session, *_ = await console.store.list_sessions("/default")
        page = await visit.context.new_page()
        await page.set_content(
            f'<form method="post" action="{console.url}/end-session?node=/default'
            f'&session={session.id}"><input name="form_token" value="x"></form>'
        )
        async with page.expect_navigation():
            await page.evaluate("document.forms[0].submit()")
        assert "came from another site" in await page.inner_text("body")
        page = await visit.context.new_page()
        await page.set_content(f'<iframe src="{console.url}/"></iframe>')
        assert not [each for each in page.frames if each.url.startswith(console.url)]
        found = await page.evaluate(
            "url => fetch(url, {credentials: 'include'}).then(() => 'read', () => 'refused')",
            f"{console.url}/api/v1/nodes",
        )
        assert found == "refused"
        left = [each.id for each in await console.store.list_sessions("/default")]
        assert session.id in left


HOSTILE = [
    "<script>window.hurt = 1</script>",
    '"><img src=x onerror="window.hurt = 1">',
    "\u202eevil\u202c.exe",
    "שלום / עולם",
    "a\x00b\x1b[2J\r\nc",
    "x" * 1024,
    " two  spaces ",
]


async def test_hostile_names_are_only_text() -> None:
    async with served() as console, chromium() as browser:
        planted = Planted(console.store)
        for number, name in enumerate(HOSTILE, start=1):
            worker = await attached(console.store, text=name)
            await enqueue(worker, number, name, data=name.encode())
            other = await attached(console.store, text=name)
            await planted.wait(other, name, task=name)
        await observed(console)
        async with visiting(console, browser) as visit:
            page = visit.page
            for path in ("/", "/semaphores", "/sessions", "/waits", "/timelines", "/events"):
                await visit.go(path)
                await visit.live()
                assert await page.evaluate("window.hurt") is None
                await picture(page, f"hostile{path.replace('/', '-')}")
            for name in HOSTILE:
                await visit.go("/semaphores")
                links = page.locator("#content tbody th a")
                hrefs = await links.evaluate_all("all => all.map(each => each.href)")
                wanted = [
                    each
                    for each in hrefs
                    if await page.evaluate(
                        "([url, name]) => new URL(url).searchParams.get('name') === name",
                        [each, name],
                    )
                ]
                assert len(wanted) == 1
                await page.goto(wanted[0])
                await visit.live()
                await visit.text(".summary", "Held, 1 waiter")
                wide = await page.evaluate(
                    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
                assert wide <= 0
                await page.locator("[aria-labelledby=h-waiters] a.button").click()
                await page.get_by_role("button", name="Evict the request").click()
                await visit.text("#content", "The request was evicted.")
                await visit.text(".summary", "Held, no waiters")
                assert await page.evaluate("window.hurt") is None


async def test_a_deadlock_of_two_programs_is_shown_until_it_ends(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    programs: list[asyncio.subprocess.Process] = []
    try:
        async with (
            served(connect_engine(url, SystemClock())) as console,
            chromium() as browser,
            visiting(console, browser) as visit,
        ):
            for pair in ("ab", "ba"):
                program = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "tests.cli.blocked", url, "wait", pair),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                programs.append(program)
                assert program.stdout is not None
                assert await program.stdout.readline() == f"inside {pair[0]}\n".encode()
            await visit.go("/waits")
            await visit.live()
            await visit.text(".summary", "No task waits inside a lease")
            for program in programs:
                assert program.stdin is not None
                program.stdin.write(b"\n")
            await visit.text(".summary", "2 tasks wait, 1 deadlock")
            await visit.text("h2", "Deadlock: 2 tasks wait for each other")
            for program in programs:
                await visit.text("ol.members", f"pid {program.pid}")
            page = visit.page
            assert await page.locator("svg.graph > svg.stuck").count() == 2
            assert await page.locator("svg.graph > path.arrow.stuck").count() == 2
            described = await page.get_by_role("img").get_attribute("aria-labelledby")
            assert "1 deadlock" in (await page.locator(f"#{described}").text_content() or "")
            assert await problems(page) == []
            await picture(page, "deadlock")
            programs[0].kill()
            await visit.text(".summary", "No task waits inside a lease")
            assert await page.locator(".deadlock").count() == 0
    finally:
        for program in programs:
            if program.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    program.kill()
            await program.wait()


async def test_a_revoked_token_leads_to_the_sign_in() -> None:
    async with busy() as (console, browser), visiting(console, browser, "reader") as visit:
        await visit.go("/semaphore?name=nightly")
        await visit.live()
        console.door.set({"admin": {"/": "administer"}})
        await visit.page.wait_for_url("**/sign-in?next=*")
        console.door.set({"reader": {"/": "read"}})
        await visit.page.get_by_label("Token").fill(token_of("reader"))
        await visit.page.keyboard.press("Enter")
        await visit.page.wait_for_url("**/semaphore?name=nightly")


async def test_pages_work_without_a_script() -> None:
    async with (
        busy() as (console, browser),
        visiting(console, browser, java_script_enabled=False) as visit,
    ):
        page = visit.page
        await page.get_by_role("link", name="Semaphores", exact=True).first.click()
        await page.get_by_label("Name contains").fill("night")
        await page.get_by_role("button", name="Show").click()
        await page.get_by_role("link", name="nightly").click()
        assert "Held, 3 waiters" in await page.inner_text(".summary")
        assert not await page.locator(".liveness").is_visible()
        await page.locator("[aria-labelledby=h-owners] a.button").click()
        await page.get_by_role("button", name="Evict the request").click()
        assert "The request was evicted." in await page.inner_text("#content")


async def test_motion_is_reduced_where_that_is_wanted() -> None:
    async with busy() as (console, browser):
        for wish, animation in (("reduce", "none"), ("no-preference", "pulse")):
            async with visiting(console, browser, reduced_motion=wish) as visit:
                await visit.live()
                name = "getComputedStyle(document.querySelector('.dot')).animationName"
                assert await visit.page.evaluate(name) == animation


async def test_an_end_of_the_console_is_shown() -> None:
    async with busy() as (console, browser), visiting(console, browser) as visit:
        await visit.live()
        await visit.context.set_offline(True)
        console.console.end_streams()
        await visit.text("#liveness", "Not live")
        await visit.context.set_offline(False)
        await visit.live()
        visit.errors.clear()
