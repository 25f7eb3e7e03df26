"""The JSON API: its description is valid, and what it returns is as described."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tenure.console import reading, service
from tenure.console.api import LONGEST_DATA, PREFIX, READS
from tenure.console.openapi import description
from tenure.model import NodeConfig
from tests.console.serving import (
    Served,
    attached,
    bearer,
    enqueue,
    from_here,
    observed,
    served,
    token_of,
)


def test_the_description_is_valid() -> None:
    OpenAPIV31SpecValidator(description(PREFIX)).validate()


def test_each_path_is_described() -> None:
    described = description(PREFIX)["paths"]
    assert set(described) == {*READS, "/sessions/end", "/requests/evict"}


def check(path: str, method: str, status: int, found: Any) -> None:
    """Compare an answer with its description."""
    described = description(PREFIX)
    response = described["paths"][path][method]["responses"][str(status)]
    schema = response["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": described["components"]}).validate(
        found
    )


async def get(console: Served, path: str, who: str = "reader", **query: object) -> Any:
    response = await console.browser.get(
        PREFIX + path, params={key: str(value) for key, value in query.items()}, headers=bearer(who)
    )
    found = response.json()
    check(path, "get", response.status_code, found)
    if response.status_code != 200:
        return response.status_code, found["error"]["kind"]
    return found


async def test_reads_return_what_is_described() -> None:
    async with served() as console:
        workers = [
            await attached(console.store, text=f"job {n} [host=db pid=7 program=x]")
            for n in range(4)
        ]
        await workers[0].create_semaphore("gpu", 4, b"\xff", exist_ok=False)
        for worker in workers:
            await enqueue(worker, 1, "nightly", data=b"hello")
        await observed(console)
        await enqueue(workers[0], 2, "apis", count=1, data=b"x" * (LONGEST_DATA + 1))
        await observed(console)

        store = await get(console, "/store")
        assert (store["semaphores"], store["held"], store["waiting"]) == (3, 2, 3)
        assert (store["trouble"], store["visitor"], store["complete"]) == (None, "reader", True)
        nodes = await get(console, "/nodes")
        assert nodes == {
            "nodes": [{"path": "/default", "sessions": 4, "semaphores": 3}],
            "following": None,
        }
        page = await get(console, "/semaphores", limit=2)
        assert [each["name"] for each in page["semaphores"]] == ["apis", "gpu"]
        assert page["semaphores"][1]["data_base64"] == "/w=="
        page = await get(console, "/semaphores", limit=2, after=page["following"])
        assert [each["name"] for each in page["semaphores"]] == ["nightly"]
        assert page["following"] is None
        page = await get(console, "/semaphores", search="GP")
        assert [(each["name"], each["kind"]) for each in page["semaphores"]] == [
            ("gpu", "semaphore")
        ]
        nightly = await get(console, "/semaphore", name="nightly", limit=2)
        assert (nightly["kind"], nightly["held"], nightly["waiting"]) == ("mutex", None, 3)
        (owner,) = nightly["owners"]
        assert (owner["host"], owner["pid"], owner["program"], owner["data"]) == (
            *("db", 7, "x"),
            "hello",
        )
        assert owner["session_description"] == "job 0"
        assert [each["session_id"] for each in nightly["waiters"]] == [
            each.id for each in workers[1:3]
        ]
        rest = await get(
            console,
            "/requests",
            name="nightly",
            role="waiters",
            after=nightly["waiters_following"],
        )
        assert [each["session_id"] for each in rest["requests"]] == [workers[3].id]
        apis = await get(console, "/semaphore", name="apis")
        assert apis["kind"] == "service"
        assert len(apis["owners"][0]["data"]) == LONGEST_DATA
        assert apis["owners"][0]["data_bytes"] == LONGEST_DATA + 1
        sessions = await get(console, "/sessions", search="job 2")
        assert [each["id"] for each in sessions["sessions"]] == [workers[2].id]
        events = (await get(console, "/events"))["events"]
        assert ("granted", "apis") in [(each["what"], each["name"]) for each in events]
        newest = events[0]["number"]
        assert (await get(console, "/events", after=newest))["events"] == []
        timeline = await get(console, "/timeline", name="nightly")
        assert [each["session_id"] for each in timeline["requests"]] == [
            each.id for each in workers
        ]


async def test_errors_are_as_described() -> None:
    async with served() as console:
        await console.store.create_node("/billing", NodeConfig(), exist_ok=False)
        assert await get(console, "/semaphore", name="none") == (404, "SemaphoreNotFound")
        assert await get(console, "/semaphores", node="/billing") == (404, "NodeNotFound")
        for role in ("owners", "waiters"):
            where = {"node": "/billing", "name": "a", "role": role}
            assert await get(console, "/requests", **where) == (404, "NodeNotFound")
            where = {"node": "/default", "name": "a", "role": role}
            assert await get(console, "/requests", **where) == (404, "SemaphoreNotFound")
        assert await get(console, "/timeline", node="/billing", name="a") == (404, "NodeNotFound")
        assert await get(console, "/events", node="/billing") == {"events": []}
        assert await get(console, "/sessions", after="x") == (400, "InvalidArgument")
        assert await get(console, "/requests", name="a", role="x") == (400, "InvalidArgument")
        assert await get(console, "/sessions", "billing", node="/default") == (
            *(403,),
            "AuthenticationFailed",
        )


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic YQ=="}]
)
async def test_a_program_needs_a_token(headers: dict[str, str]) -> None:
    async with served() as console:
        for path in READS:
            response = await console.browser.get(PREFIX + path, headers=headers)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            check(path, "get", 401, response.json())
            assert "set-cookie" not in response.headers
        response = await console.browser.get(f"{PREFIX}/none", headers=bearer("admin"))
        assert (response.status_code, response.json()["error"]["kind"]) == (404, "HTTP")


async def test_a_revoked_token_ends_at_once() -> None:
    async with served() as console:
        assert (await get(console, "/nodes"))["nodes"]
        console.door.set({"admin": {"/": "administer"}})
        response = await console.browser.get(f"{PREFIX}/nodes", headers=bearer("reader"))
        assert response.status_code == 401


async def test_the_description_is_public() -> None:
    async with served() as console:
        response = await console.browser.get(f"{PREFIX}/openapi.json")
        assert response.json()["servers"] == [{"url": PREFIX}]


async def post(console: Served, path: str, who: str, body: dict[str, Any]) -> tuple[int, Any]:
    response = await console.browser.post(PREFIX + path, json=body, headers=bearer(who))
    check(path, "post", response.status_code, response.json())
    return response.status_code, response.json()


async def test_an_administrator_acts_by_the_api() -> None:
    async with served() as console:
        worker, other = await attached(console.store), await attached(console.store)
        await enqueue(worker, 1, "nightly")
        await enqueue(other, 1, "nightly")
        (owner,) = (await get(console, "/semaphore", name="nightly"))["owners"]
        evicting = {"node": "/default", "name": "nightly", "order_id": owner["order_id"]}
        ending = {"node": "/default", "session_id": other.id}
        for who in ("reader", "holder"):
            for path, body in (("/requests/evict", evicting), ("/sessions/end", ending)):
                status, found = await post(console, path, who, body)
                assert (status, found["error"]["kind"]) == (403, "AuthenticationFailed")
        assert await post(console, "/requests/evict", "admin", evicting) == (
            200,
            {"evicted": True, **evicting},
        )
        assert await post(console, "/sessions/end", "admin", ending) == (
            200,
            {"ended": True, **ending},
        )
        assert await post(console, "/sessions/end", "admin", ending) == (
            200,
            {"ended": False, **ending},
        )
        outcomes = [(each["event"], each["outcome"]) for each in console.door.acts]
        assert outcomes == [
            ("request evicted", "done"),
            ("session ended", "done"),
            ("session ended", None),
        ]


async def test_an_action_without_an_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ANSWER_TIMEOUT", 0.05)
    async with served() as console:

        async def hangs(path: str, session_id: int) -> bool:
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr(console.store, "end_session", hangs)
        body = {"node": "/default", "session_id": 7}
        status, found = await post(console, "/sessions/end", "admin", body)
        assert status == 503
        assert "it is not known whether this was done" in found["error"]["message"]
        assert [each["outcome"] for each in console.door.acts] == ["failed"]


async def test_searches_of_a_visitor_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0

    async def search(*_: object, **__: object) -> reading.Page[Any, str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return reading.Page([], None)

    monkeypatch.setattr(reading, "semaphores", search)
    async with served() as console:
        paths = [*["/semaphores?search=a"] * 5, *[f"{PREFIX}/semaphores?search=a"] * 5]
        found = await asyncio.gather(
            *(console.browser.get(path, headers=bearer("reader")) for path in paths)
        )
        assert {each.status_code for each in found} == {200}
        assert most == 1


async def test_a_cookie_changes_nothing_by_the_api() -> None:
    async with served() as console, console.signed_in("admin") as browser:
        worker = await attached(console.store)
        assert (await browser.get(f"{PREFIX}/nodes")).status_code == 200
        response = await browser.post(
            f"{PREFIX}/sessions/end",
            json={"node": "/default", "session_id": worker.id},
            headers=from_here(browser),
        )
        assert response.status_code == 403
        assert len(await console.store.list_sessions("/default")) == 1


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"node": null}', "application/json", 400),
        (b'{"node": true}', "application/json", 400),
        (b"[" * 60000, "application/json", 400),
        (b'{"node": "/default", "session_id": -1}', "application/json", 400),
        (b'{"node": "/default", "session_id": 1e400}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b" " * 70000, "application/json", 413),
    ],
)
async def test_a_damaged_body_is_rejected(content: bytes, kind: str, status: int) -> None:
    async with served() as console:
        response = await console.browser.post(
            f"{PREFIX}/sessions/end",
            content=content,
            headers=bearer("admin") | {"Content-Type": kind},
        )
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert token_of("admin") not in response.text
