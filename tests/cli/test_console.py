"""`tenure console`: the console of any store, for the user of this machine."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tenure.cli.mistakes import Status
from tenure.console import local
from tenure.errors import AuthenticationFailed
from tests.cli.programs import Running, Tenure
from tests.ports import free_port


def address(line: str) -> str:
    """The address in a line."""
    found = re.search(r"http://127\.0\.0\.1:[0-9]+/sign-in\?token=[\w-]+", line)
    assert found is not None, line
    return found[0]


def started(tenure: Tenure, *options: str) -> tuple[Running, str]:
    """A console that listens, and the address that it prints."""
    running = tenure.start("console", *options)
    assert running.line().startswith(f"the console of {tenure.url}, which ")
    return running, address(running.line())


def form_token(page: str) -> str:
    found = re.search(r'name="form_token" value="([0-9a-f]{64})"', page)
    assert found is not None
    return found[1]


def test_an_address_signs_one_browser_in(tenure: Tenure) -> None:
    tenure.hold("--data", "host-1")
    running, first = started(tenure)
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        page = browser.get(first)
        assert (page.status_code, page.url.path, page.url.query) == (200, "/", b"")
        page = browser.get(page.url.join("/semaphore?name=nightly"))
        assert "host-1" in page.text
    second = address(running.line())
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        page = browser.get(first)
        assert page.status_code == 403
        assert "a browser has used it before" in page.text
        assert browser.get(second).status_code == 200
    running.signal(signal.SIGINT)
    assert running.end() == (128 + signal.SIGINT, "")


def test_it_only_looks_unless_it_may_administer(tenure: Tenure) -> None:
    holder = tenure.hold()
    (session,) = tenure.json("session", "ls")["sessions"]
    where = f"/end-session?node=/default&session={session['id']}"
    running, link = started(tenure)
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        base = browser.get(link).url
        assert "/end-session" not in browser.get(base.join("/sessions")).text
        assert browser.get(base.join(where)).status_code == 403
    running.signal(signal.SIGTERM)
    assert running.end() == (128 + signal.SIGTERM, "")
    running, link = started(tenure, "--administer")
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        base = browser.get(link).url
        form = {"form_token": form_token(browser.get(base.join(where)).text)}
        origin = {"Origin": str(base).rstrip("/")}
        page = browser.post(base.join(where), data=form, headers=origin)
        assert "The session was ended." in page.text
    assert tenure.json("session", "ls")["sessions"] == []
    running.signal(signal.SIGINT)
    running.end()
    holder.end()


def test_it_ends_while_pages_are_live(tenure: Tenure) -> None:
    tenure.hold()
    running, link = started(tenure)
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        base = browser.get(link).url
        with browser.stream("GET", base.join("/live")) as stream:
            lines = stream.iter_lines()
            while not next(lines).startswith("event: main"):
                pass
            running.signal(signal.SIGINT)
            assert running.end() == (128 + signal.SIGINT, "")


def test_a_store_that_cannot_be_used_is_a_mistake(tenure: Tenure) -> None:
    done = tenure("console")
    assert (done.returncode, done.stdout) == (Status.STORE, "")
    assert "there is no " in done.stderr
    done = tenure("--url", f"redis://127.0.0.1:{free_port()}", "console")
    assert (done.returncode, done.stdout) == (Status.STORE, "")
    assert re.fullmatch(r"tenure: [^\n]*redis://127.0.0.1[^\n]*\n", done.stderr)
    done = tenure("--url", "memory://", "console")
    assert (done.returncode, "is the memory of one process" in done.stderr) == (Status.USAGE, True)


@pytest.mark.parametrize("listen", ["8080", "127.0.0.1", ":80", "127.0.0.1:a", "[::1]:70000"])
def test_an_address_is_a_host_and_a_port(tenure: Tenure, listen: str) -> None:
    tenure.hold().signal(signal.SIGTERM)
    done = tenure.inside("console", "--listen", listen)
    assert done.returncode == Status.USAGE
    assert "--listen is HOST:PORT" in done.stderr


def test_an_address_in_use_is_a_mistake(tenure: Tenure) -> None:
    tenure.hold()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = tenure.inside("console", "--listen", place)
    assert done.returncode == Status.STORE
    assert f"cannot listen on {place}: Address already in use" in done.stderr


@pytest.mark.parametrize("missing", ["jinja2", "starlette", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(tenure: Tenure, missing: str) -> None:
    tenure.hold()
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from tenure.cli.app import invoke; sys.exit(invoke(['console']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=tenure.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Status.USAGE
    assert done.stderr == (
        f"tenure: tenure console needs {missing}; install it with: pip install 'tenure[console]'\n"
    )


async def test_a_wrong_token_is_not_the_end_of_the_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "WRONG_TOKEN_DELAY", 0.0)
    printed: list[str] = []
    visitor = local.LocalVisitor(None, administer=False)  # type: ignore[arg-type]
    door = local.LocalDoor(visitor, printed.append)
    first = door.token
    for wrong in ("", "ä", first[:-1], "\udc80"):
        with pytest.raises(AuthenticationFailed):
            await door.sign_in(wrong, "127.0.0.1", {})
    assert await door.sign_in(first, "127.0.0.1", {}) is visitor
    assert printed == [door.token]
    assert door.token != first
    assert door.still_valid(visitor)
    assert not visitor.may("/default", "administer")
    assert visitor.may("/default", "read")
