"""Pages of the console: signing in, what each visitor sees and may do, hostile names."""

from __future__ import annotations

import html
import re
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from tenure.console.app import CONFIRMATIONS, PAGES, is_local, make_app
from tenure.console.rendering import Rendering, link
from tenure.console.security import HEADERS, is_known_host
from tenure.console.service import LARGEST_BODY
from tenure.errors import EngineError
from tenure.model import NodeConfig
from tests.console.serving import (
    attached,
    bearer,
    enqueue,
    from_here,
    observed,
    served,
    token_of,
)

HOSTILE = [
    "<script>alert(1)</script>",
    '"onmouseover="alert(1)',
    "a/b/../c?d=e&f#g",
    "{{ 7 * 7 }}{% raw %}",
    "\u202eevil\u202c txt",
    "line\r\nSet-Cookie: a=b",
    "\x00\x1b[2J",
    "שלום עולם",
    "ä" * 512,
    " ",
    "%2e%2e%2f%00",
    "'; DROP TABLE semaphores; --",
]


def form_token(page: str) -> str:
    found = re.search(r'name="form_token" value="([0-9a-f]{64})"', page)
    assert found is not None
    return found[1]


# Signing in and out


@pytest.mark.parametrize("path", [*PAGES, *CONFIRMATIONS])
async def test_a_page_leads_a_stranger_to_the_sign_in(path: str) -> None:
    async with served() as console:
        response = await console.browser.get(path, params={"name": "a\nb"})
        assert response.status_code == 303
        target = urlsplit(response.headers["location"])
        assert target.path == "/sign-in"
        (following,) = parse_qs(target.query)["next"]
        assert following == f"{path}?name=a%0Ab"


async def test_a_browser_signs_in_and_out() -> None:
    async with served() as console:
        browser = console.browser
        form = {"token": token_of("reader"), "next": "/sessions?node=/default"}
        response = await browser.post("/sign-in", data=form, headers=from_here(browser))
        assert (response.status_code, response.headers["location"]) == (303, form["next"])
        cookie = response.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert "Secure" not in cookie  # it is not TLS
        assert token_of("reader") not in cookie
        page = await browser.get("/sessions")
        assert page.status_code == 200
        assert "reader" in page.text
        response = await browser.post("/sign-out", headers=from_here(browser))
        assert response.status_code == 303
        assert (await browser.get("/sessions")).status_code == 303


async def test_a_cookie_is_of_no_use_after_the_sign_out() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        stolen = dict(browser.cookies)
        await browser.post("/sign-out", headers=from_here(browser))
        console.browser.cookies.update(stolen)
        assert (await console.browser.get("/")).status_code == 303


async def test_a_wrong_token_is_rejected() -> None:
    async with served() as console:
        browser = console.browser
        form = {"token": "<b>wrong</b>"}
        response = await browser.post("/sign-in", data=form, headers=from_here(browser))
        assert response.status_code == 403
        assert "does not know this token" in response.text
        assert "wrong" not in response.text
        assert "set-cookie" not in response.headers


async def test_a_token_in_an_address_signs_in_unless_another_site_has_the_link() -> None:
    async with served() as console:
        browser, path = console.browser, f"/sign-in?token={token_of('reader')}"
        other = {"Sec-Fetch-Site": "cross-site"}
        response = await browser.get(path, headers=other)
        assert response.status_code == 200
        assert f'value="{token_of("reader")}"' in response.text  # the visitor may submit it
        assert "set-cookie" not in response.headers
        response = await browser.get(path, headers={"Sec-Fetch-Site": "none"})
        assert response.status_code == 303
        assert "set-cookie" in response.headers


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("/semaphore?name=a", True),
        ("//evil.example", False),
        ("https://evil.example/", False),
        ("/\\evil.example", False),
        ("/a\r\nb", False),
        ("", False),
        ("javascript:alert(1)", False),
    ],
)
async def test_a_sign_in_leads_to_this_server_only(target: str, local: bool) -> None:
    assert is_local(target) == local
    async with served() as console:
        form = {"token": token_of("reader"), "next": target}
        response = await console.browser.post(
            "/sign-in", data=form, headers=from_here(console.browser)
        )
        assert response.headers["location"] == (target if local else "/")


async def test_a_revoked_token_ends_its_sign_ins() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        assert (await browser.get("/")).status_code == 200
        console.door.set({"admin": {"/": "administer"}})
        assert (await browser.get("/")).status_code == 303


async def test_a_connection_that_shows_its_visitor_needs_no_sign_in() -> None:
    async with served() as console:
        console.door.open = True
        page = await console.browser.get("/")
        assert page.status_code == 200
        assert "Sign out" not in page.text


# Protection


async def test_each_response_has_the_headers() -> None:
    async with served() as console:
        for path in ("/sign-in", "/", "/nothing", "/api/v1/nodes", "/live", "/static/console.js"):
            response = await console.browser.get(path)
            for name, value in HEADERS.items():
                assert response.headers[name] == value, path
            if not path.startswith("/static"):
                assert response.headers["cache-control"] == "no-store"


async def test_a_page_has_no_script_and_no_style_of_its_own() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        worker = await attached(console.store)
        await enqueue(worker, 1, "nightly")
        await observed(console)
        for path in (*PAGES, "/semaphore?name=nightly"):
            page = (await browser.get(path)).text
            assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style|javascript:", page)
            assert re.findall(r"<script[^>]*>", page) == [
                f'<script src="/static/console.js?v={Rendering().version}" defer>'
            ]
            assert not re.search(r'(src|href)="(?!/|#)', page)


async def test_files_are_kept_by_browsers_as_long_as_they_are_current() -> None:
    async with served() as console:
        version = Rendering().version
        response = await console.browser.get(f"/static/console.css?v={version}")
        assert "immutable" in response.headers["cache-control"]
        assert response.headers["content-type"] == "text/css; charset=utf-8"
        response = await console.browser.get("/static/console.css?v=old")
        assert response.headers["cache-control"] == "no-cache"
        assert (await console.browser.get("/static/../app.py")).status_code == 404
        assert (await console.browser.get("/static/layout.html")).status_code == 404


@pytest.mark.parametrize(
    ("authority", "known"),
    [
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("console.example", True),
        ("Console.Example:443", True),
        ("evil.example", False),
        ("console.example.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("", False),
        ("127.0.0.1@evil.example", False),
    ],
)
async def test_a_host_name_has_to_be_known(authority: str, known: bool) -> None:
    assert is_known_host(authority, {"console.example"}) == known
    async with served(hosts=["console.example"]) as console:
        response = await console.browser.get("/sign-in", headers={"Host": authority})
        if authority:
            assert response.status_code == (200 if known else 421)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
)
async def test_a_form_of_another_site_is_rejected(headers: dict[str, str]) -> None:
    async with served() as console, console.signed_in("admin") as browser:
        worker = await attached(console.store)
        page = await browser.get(f"/end-session?node=/default&session={worker.id}")
        path = str(page.url)
        form = {"form_token": form_token(page.text)}
        response = await browser.post(path, data=form, headers=headers)
        assert response.status_code == 403
        assert len(await console.store.list_sessions("/default")) == 1
        response = await browser.post(path, data=form, headers=from_here(browser))
        assert response.status_code == 303
        assert not await console.store.list_sessions("/default")


async def test_a_form_needs_the_token_of_its_sign_in() -> None:
    async with (
        served() as console,
        console.signed_in("admin") as browser,
        console.signed_in("admin") as another,
    ):
        worker = await attached(console.store)
        path = f"/end-session?node=/default&session={worker.id}"
        tokens = ["", "0" * 64, "ä", form_token((await another.get(path)).text)]
        for token in tokens:
            form = {"form_token": token}
            response = await browser.post(path, data=form, headers=from_here(browser))
            assert response.status_code == 403
        assert len(await console.store.list_sessions("/default")) == 1


async def test_forms_are_short_and_well_formed() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        headers = from_here(browser)
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        for content, kind, status in (
            (b"x" * (LARGEST_BODY + 1), form, 413),
            (b"a=%ff%fe", form, 400),
            (b"\xff", form, 400),
            (b"&".join([b"a=b"] * 60), form, 400),
            (b"{}", {"Content-Type": "application/json"}, 415),
        ):
            response = await browser.post("/evict", content=content, headers=headers | kind)
            assert response.status_code == status, content[:20]


# Permissions


async def test_a_visitor_sees_only_the_nodes_that_it_may_read() -> None:
    async with served() as console:
        await console.store.create_node("/billing", NodeConfig(), exist_ok=False)
        secret = await attached(console.store, "/billing", "payroll")
        await enqueue(secret, 1, "secret-lock")
        await observed(console)
        async with console.signed_in("reader") as browser:
            for path in (*PAGES, "/timelines?node=/billing", "/events?node=/billing"):
                page = await browser.get(path)
                assert page.status_code in {200, 400}, path
                assert "secret-lock" not in page.text
                assert "payroll" not in page.text
            where = {"node": "/billing", "name": "secret-lock"}
            for path in ("/semaphores", "/semaphore", "/sessions"):
                page = await browser.get(path, params=where)
                assert page.status_code == 404
                assert "there is no node /billing" in page.text
        async with console.signed_in("billing") as browser:
            page = await browser.get("/semaphores")  # the first node that it may read
            assert "secret-lock" in page.text
            page = await browser.get("/")
            assert "secret-lock" in page.text
            assert ">/default<" not in page.text
            page = await browser.get("/sessions?node=/default")
            assert page.status_code == 403


@pytest.mark.parametrize("name", ["reader", "holder"])
async def test_only_an_administrator_ends_sessions_and_evicts(name: str) -> None:
    async with served() as console, console.signed_in(name) as browser:
        worker = await attached(console.store)
        await enqueue(worker, 1, "nightly")
        described = await console.store.describe_semaphore(
            "/default", "nightly", owners=True, waiters=False
        )
        token = described.owners[0].order_id
        page = await browser.get("/semaphore?name=nightly")
        assert "/evict" not in page.text
        assert "/end-session" not in (await browser.get("/sessions")).text
        ending = {"node": "/default", "session": str(worker.id)}
        evicting = {"node": "/default", "name": "nightly", "order_id": str(token)}
        for path, facts in (("/end-session", ending), ("/evict", evicting)):
            response = await browser.get(path, params=facts)
            assert response.status_code == 403
            secret = next(iter(browser.cookies.values()))
            visitor = console.console.sign_ins.find(secret, console.console.clock.now())
            assert visitor is not None
            right = console.console.sign_ins.form_token(secret, visitor)
            form = {"form_token": right}
            response = await browser.post(path, params=facts, data=form, headers=from_here(browser))
            assert response.status_code == 403
            assert "may not administer /default" in response.text
        assert len(await console.store.list_sessions("/default")) == 1
        assert console.door.acts == []


async def test_an_administrator_ends_a_session_after_a_confirmation() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        worker, other = await attached(console.store), await attached(console.store)
        await enqueue(worker, 1, "nightly")
        await enqueue(other, 1, "nightly")
        await observed(console)
        path = f"/end-session?node=/default&session={worker.id}"
        assert html.escape(path) in (await browser.get("/sessions")).text
        page = (await browser.get(path)).text
        assert "What happens" in page
        assert "with 1 waiter" in page
        assert len(await console.store.list_sessions("/default")) == 2  # nothing has happened yet
        form = {"form_token": form_token(page)}
        response = await browser.post(path, data=form, headers=from_here(browser))
        page = (await browser.get(response.headers["location"])).text
        assert "The session was ended." in page
        (left,) = await console.store.list_sessions("/default")
        assert left.id == other.id
        response = await browser.post(path, data=form, headers=from_here(browser))
        page = (await browser.get(response.headers["location"])).text
        assert "had ended before" in page
        facts = {"event": "session ended", "by": "admin", "node": "/default", "session": worker.id}
        assert console.door.acts == [
            facts | {"outcome": "done"},
            facts | {"outcome": None},
        ]
        assert (await browser.get(path)).status_code == 404


async def test_an_administrator_evicts_a_request_after_a_confirmation() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        worker, other = await attached(console.store), await attached(console.store)
        for each in (worker, other):
            await enqueue(each, 1, "a/b <i>", data=b"from " + str(each.id).encode())

        async def owners() -> list[int]:
            seen = await console.store.describe_semaphore(
                "/default", "a/b <i>", owners=True, waiters=False
            )
            return [each.order_id for each in seen.owners]

        (token,) = await owners()
        page = (await browser.get("/semaphore", params={"name": "a/b <i>"})).text
        path = re.search(rf'href="(/evict[^"]*order_id={token})"', page)
        assert path is not None
        address = html.unescape(path[1])
        page = (await browser.get(address)).text
        assert "the first of 1 waiter may be granted" in page
        form = {"form_token": form_token(page)}
        response = await browser.post(address, data=form, headers=from_here(browser))
        page = (await browser.get(response.headers["location"])).text
        assert "The request was evicted." in page
        assert await owners() not in ([token], [])
        assert console.door.acts[0]["outcome"] == "done"


# Hostile names


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_name_is_only_text(name: str) -> None:
    async with served() as console, console.signed_in("admin") as browser:
        worker = await attached(console.store, text=name)
        await enqueue(worker, 1, name, data=name.encode())
        await observed(console)
        listed = (await browser.get("/semaphores")).text
        paths = [
            html.unescape(each)
            for each in re.findall(r'href="(/semaphore\?[^"]*name=[^"]*)"', listed)
        ]
        assert len(paths) == 1
        (sent,) = parse_qs(urlsplit(paths[0]).query, keep_blank_values=True)["name"]
        assert sent == name
        page = await browser.get(paths[0])
        assert page.status_code == 200
        assert "Held, no waiters" in page.text
        described = await console.store.describe_semaphore(
            "/default", name, owners=True, waiters=False
        )
        order_id = str(described.owners[0].order_id)
        where = {"node": "/default", "name": name, "order_id": order_id}
        pages = [
            listed,
            page.text,
            (await browser.get("/sessions")).text,
            (await browser.get("/")).text,
            (await browser.get("/timelines")).text,
            (await browser.get("/events")).text,
            (await browser.get("/evict", params=where)).text,
            (await browser.get("/semaphores", params={"search": name})).text,
        ]
        for text in [re.sub(r'<input type="search"[^>]*>', "", each) for each in pages]:
            assert "<script>alert" not in text
            assert not re.search(r"<[^>]*\sonmouseover=[^>]*>", re.sub(r'="[^"]*"', "=''", text))
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert "49" not in re.findall(r"<bdi[^>]*>([^<]*)</bdi>", text)
        response = await browser.post(
            "/evict",
            params=where,
            data={"form_token": form_token(pages[6])},
            headers=from_here(browser),
        )
        assert response.status_code == 303
        assert "set-cookie" not in response.headers
        (sent,) = parse_qs(urlsplit(response.headers["location"]).query)["name"]
        assert sent == name


@pytest.mark.parametrize(
    "path",
    [
        "/semaphores?node=nothing",
        "/semaphores?node=/" + "a" * 2000,
        "/semaphore",
        "/semaphore?name=" + "a" * 1025,
        "/semaphore?name=a&owners_after=-1",
        "/sessions?after=a",
        "/sessions?after=" + "9" * 5000,
        "/sessions?limit=501",
        "/sessions?after=%D9%A1",
    ],
)
async def test_a_wrong_address_is_explained(path: str) -> None:
    async with served() as console, console.signed_in("admin") as browser:
        page = await browser.get(path)
        assert page.status_code == 400
        assert "notice bad" in page.text


async def test_pages_that_do_not_exist_say_so() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        assert (await browser.get("/semaphores?node=/none")).status_code == 404
        assert (await browser.get("/semaphore?node=/none&name=a")).status_code == 404
        assert (await browser.get("/end-session?node=/default&session=77")).status_code == 404
        assert (await browser.get("/none")).status_code == 404
        assert (await browser.post("/", headers=from_here(browser))).status_code == 405
        page = await browser.get("/semaphore?name=free")
        assert page.status_code == 200
        assert "it has no holder and no waiter" in page.text


# Contents


async def test_lists_come_in_pages() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        worker = await attached(console.store)
        names = [f"lock-{number:03}" for number in range(120)]
        for number, name in enumerate(names, start=1):
            await enqueue(worker, number, name)
        found: list[str] = []
        path = "/semaphores"
        while path:
            page = (await browser.get(path)).text
            found += re.findall(
                r'<a href="/semaphore\?[^"]*"><bdi class="name">([^<]*)</bdi>', page
            )
            following = re.search(r'<a rel="next" href="([^"]*)"', page)
            path = html.unescape(following[1]) if following else ""
        assert found == names
        page = (await browser.get("/semaphores?search=K-11")).text
        assert re.findall(r'<bdi class="name">(lock-[^<]*)</bdi></a>', page) == names[110:120]
        page = (await browser.get("/semaphores?search=nothing")).text
        assert "No semaphore on" in page


async def test_a_queue_comes_in_pages() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        workers = [await attached(console.store, text=f"job {number}") for number in range(121)]
        for worker in workers:
            await enqueue(worker, 1, "nightly")
        found: list[str] = []
        path = "/semaphore?name=nightly"
        page = (await browser.get(path)).text
        assert "Held, 120 waiters" in page
        while path:
            page = (await browser.get(path)).text
            queue = page[page.index('id="h-waiters"') :]
            found += re.findall(r'<td><bdi class="name">job (\d+)</bdi></td>', queue)
            following = re.search(r'<a rel="next" href="([^"]*waiters_after[^"]*)"', page)
            path = html.unescape(following[1]) if following else ""
        assert found == [str(number) for number in range(1, 121)]


async def test_a_page_shows_what_a_semaphore_is() -> None:
    async with served() as console, console.signed_in("reader") as browser:
        worker = await attached(console.store)
        await worker.create_semaphore("gpu", 4, b"", exist_ok=False)
        await worker.create_semaphore("limits", 1, b'{"a": 1}', exist_ok=False)
        await worker.create_semaphore("primary", 1, b"", exist_ok=False)
        await enqueue(worker, 1, "gpu", count=3, ephemeral=False)
        await enqueue(worker, 2, "primary", count=1, data=b"10.0.0.7:80", ephemeral=False)
        await enqueue(worker, 3, "apis", count=1, data=b"10.0.0.8:80")
        await enqueue(worker, 4, "nightly")
        kinds = {
            "gpu": "semaphore",
            "limits": "config",
            "primary": "election",
            "apis": "service",
            "nightly": "mutex",
        }
        for name, kind in kinds.items():
            page = (await browser.get("/semaphore", params={"name": name})).text
            assert f'<span class="kind {kind}">' in page, name
        await observed(console)
        listed = (await browser.get("/semaphores")).text
        for data in ("10.0.0.7:80", "10.0.0.8:80", "{&#34;a&#34;: 1}"):
            assert f'<td><bdi class="data">{data}</bdi></td>' in listed
        assert "3 of 4 held" in (await browser.get("/semaphore?name=gpu")).text
        assert "Leader" in (await browser.get("/semaphore?name=primary")).text
        assert "{&#34;a&#34;: 1}" in (await browser.get("/semaphore?name=limits")).text


async def test_a_store_that_grants_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as console, console.signed_in("reader") as browser:
        await enqueue(await attached(console.store), 1, "nightly")
        why = EngineError("nothing is granted for another 5 s")
        monkeypatch.setattr(console.store, "trouble", lambda name=None: why)
        for path in ("/", "/semaphore?name=nightly", "/semaphore?name=free"):
            assert "nothing is granted for another 5 s" in (await browser.get(path)).text
        found = await console.browser.get("/api/v1/store", headers=bearer("reader"))
        assert found.json()["trouble"] == str(why)


async def test_a_bearer_token_reads_pages_too() -> None:
    async with served() as console:
        page = await console.browser.get("/", headers=bearer("reader"))
        assert page.status_code == 200
        page = await console.browser.get("/", headers={"Authorization": "Bearer wrong"})
        assert page.status_code == 403
        page = await console.browser.get("/", headers={"Authorization": "Bearer"})
        assert page.status_code == 403


def test_links_are_encoded() -> None:
    assert link("/a b", "/semaphore", node="/x", name="a&b=c/#") == (
        "/a%20b/semaphore?node=/x&name=a%26b%3Dc/%23"
    )
    assert link("", "/", after=None, search="") == "/"


async def test_the_console_works_below_a_path() -> None:
    async with served() as console:
        console.door.open = True
        app = Starlette(routes=[Mount("/console", make_app(console.door, console.store))])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser:
            page = await browser.get("/console/")
            assert page.status_code == 200
            assert set(re.findall(r'(?:src|href|action)="(/[^/"]*)', page.text)) == {"/console"}
            assert 'data-live="/console/live"' in page.text
            assert (await browser.get("/console/static/console.js")).status_code == 200
