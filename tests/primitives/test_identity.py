"""Every session says which program it belongs to, and others read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenure import identity
from tenure._client.client import Client, connect
from tenure.clock import Clock
from tenure.identity import ANONYMOUS, Identity, described, holder_name, part, retold, seen_from
from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tests.primitives.helpers import World

BACKUP = Identity("db-1", 4242, "backup.py")
LONGEST = "[host=" + "h" * 200 + " pid=1 program=p]"

texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="[]=() hostpidprogram0\n\x1b\x00é😀", max_size=60),
    st.builds(
        lambda text, identity, end: described(text, identity) + end,
        st.text(max_size=20),
        st.builds(Identity, st.text(max_size=9), st.integers(0, 9), st.text(max_size=9)),
        st.sampled_from(["", " ", " [host=]", "\n"]),
    ),
).filter(lambda text: not any("\ud800" <= each <= "\udfff" for each in text))
long_texts = st.builds(
    lambda letter, size, end: (letter * size)[: 1024 - len(end)] + end,
    st.sampled_from(["a", " ", "["]),
    st.integers(900, 1024),
    st.sampled_from(["", "]", " [host=x]", " [host=]"]),
)
names = st.text(alphabet="abz09.-_ é[]\x1b\n/", min_size=1, max_size=300)
identities = st.builds(Identity, names, st.integers(0, 2**22), names)


@given(text=texts, identity=identities)
def test_a_description_and_an_identity_are_read_as_they_were_written(
    text: str, identity: Identity
) -> None:
    stored = described(text, identity)
    own, read = part(stored)
    assert own == text
    assert read is not None
    assert read.pid == identity.pid
    assert described(own, read) == stored


@given(text=texts)
@example("[host=db-1 pid=1 program=x]")
@example("[host=]")
@example("x [host=]")
@example(" [host=a]")
def test_a_text_that_looks_like_an_identity_is_read_as_a_text(text: str) -> None:
    own, identity = part(described(text, ANONYMOUS))
    assert own == text
    assert identity in {None, ANONYMOUS}


@given(text=texts | long_texts, identity=identities | st.just(ANONYMOUS))
@example("a" * 1024, BACKUP)
@example("ü" * 512, BACKUP)
@example("a" * 1000, BACKUP)
@example("a" * 1015 + " [host=x]", ANONYMOUS)
@example("a" * 1015 + " [host=x]", BACKUP)
def test_a_description_never_has_more_than_1024_bytes(text: str, identity: Identity) -> None:
    stored = described(text, identity)
    assert len(stored.encode()) <= 1024
    own, read = part(stored)
    if own != text:  # it ended like an identity, and left no room to say that it is none
        assert read is None
        assert len(text.encode()) > 1016
        before, _, after = text.rpartition("[host=")
        assert own == f"{before}(host={after}"


def test_the_program_s_name_is_shortened_first() -> None:
    shortened = " [host=db-1 pid=4242 program=backup.p]"
    text = "a" * (1024 - len(shortened))
    assert described(text, BACKUP) == text + shortened
    assert part(described("a" * 1000, BACKUP)) == ("a" * 1000, Identity("db-1", 4242))
    assert described("a" * 1010, BACKUP) == "a" * 1010


def test_what_cannot_be_shown_is_replaced() -> None:
    stored = described("x", Identity("my host", 1, "a[b]\x1b[31m\n.py"))
    assert part(stored) == ("x", Identity("my_host", 1, "a_b__[31m_.py".replace("[", "_")))


def test_a_session_that_is_taken_over_is_its_new_program_s() -> None:
    new = Identity("db-2", 7, "after.py")
    assert part(retold(described("mine", BACKUP), described("", new))) == ("mine", new)
    assert retold(described("mine", BACKUP), "") == "mine"


def test_a_client_that_tells_nothing_is_known_by_its_address() -> None:
    assert seen_from("sdk", "10.0.0.7") == "sdk [host=10.0.0.7]"
    assert seen_from("", "10.0.0.7") == "[host=10.0.0.7]"
    assert seen_from("sdk", None) == "sdk"
    said = described("mine", BACKUP)
    assert seen_from(said, "10.0.0.7") == said


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        ({"host": "db-1", "pid": 42, "program": "backup.py"}, "backup.py, pid 42 on db-1"),
        ({"host": "db-1", "pid": 42}, "pid 42 on db-1"),
        ({"pid": 42}, "pid 42"),
        ({"host": "db-1"}, "db-1"),
        ({"host": "db-1", "program": "x"}, "x on db-1"),
        ({}, "session 7"),
        ({"program": "a\x1b[31m", "pid": 1}, "a\\x1b[31m, pid 1"),
    ],
)
def test_a_holder_has_a_name_for_people(request_: dict[str, object], name: str) -> None:
    described = RequestDescription(7, 1, 1, b"", **request_)  # type: ignore[arg-type]
    assert holder_name(described) == name


def test_the_store_s_knowledge_remains_where_a_session_says_nothing() -> None:
    known = SessionDescription(1, "/n", "mine", 30.0, pid=5, host="here")
    assert identity.session_with_identity(known) == known
    silent = SessionDescription(1, "/n", "[host=] [host=]", 30.0, pid=5, host="here")
    assert identity.session_with_identity(silent).description == "[host=]"
    assert identity.session_with_identity(silent).pid == 5


def test_a_request_that_tells_nothing_shows_its_text_alone() -> None:
    request = RequestDescription(1, 1, 1, b"", session_description="x [host=] [host=]", pid=5)
    found = SemaphoreDescription("m", b"", 1, 1, ephemeral=True, owners=(request,))
    (owner,) = identity.semaphore_with_identities(found).owners
    assert (owner.session_description, owner.pid) == ("x [host=]", 5)


async def test_others_see_which_program_holds_and_which_wait(world: World) -> None:
    program = identity.this_program()
    async with (
        world.client() as client,
        world.client() as other,
        client.session(description="the nightly one") as session,
        session.mutex("m").lock(),
        other.semaphore("m", ephemeral=True).enqueue(2**64 - 1),
    ):
        holder = await other.mutex("m").inspect()
        assert holder is not None
        assert Identity(holder.host, holder.pid, holder.program) == program
        assert holder.description == "the nightly one"
        found = await other.describe_semaphore("m")
        for each in (*found.owners, *found.waiters):
            assert Identity(each.host, each.pid, each.program) == program
        assert found.owners[0].session_description == "the nightly one"
        listed = await other.list_sessions()
        assert {Identity(each.host, each.pid, each.program) for each in listed} == {program}
        assert {each.description for each in listed} == {"the nightly one", ""}


async def test_a_leader_is_seen_with_its_program(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with client.election("e").campaign(b"address"):
            leader = await other.election("e").leader()
            async with other.election("e").observe() as leaders:
                observed = await anext(leaders)
        for each in (leader, observed):
            assert each is not None
            assert Identity(each.host, each.pid, each.program) == identity.this_program()
            assert each.description == ""


async def test_a_program_need_not_tell_its_identity(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    for said in ("0", " No ", "off"):
        monkeypatch.setenv("TENURE_IDENTIFY", said)
        assert not identity.identify_by_default()
        await _tells_nothing(connect("memory://", clock=clock))
    monkeypatch.setenv("TENURE_IDENTIFY", "1")
    assert identity.identify_by_default()
    await _tells_nothing(connect("memory://", clock=clock, identify=False))


async def _tells_nothing(client: Client) -> None:
    async with client, client.session(description="mine") as session, session.mutex("m").lock():
        holder = await session.mutex("m").inspect()
        assert holder is not None
        assert (holder.host, holder.pid, holder.program) == (None, None, None)
        (listed,) = await client.list_sessions()
        assert listed.description == "mine"
        assert (listed.host, listed.pid, listed.program) == (None, None, None)


PRINTED = "import sys; from tenure.identity import this_program; print(this_program().program)"


@pytest.mark.parametrize(
    ("module", "script", "interpreter", "name"),
    [
        ("", "/srv/jobs/backup.py", "/usr/bin/python3", "backup.py"),
        ("", "/srv/jobs/__main__.py", "/usr/bin/python3", "jobs"),
        ("", "__main__.py", "/usr/bin/python3", "__main__.py"),
        ("__main__", "app.pyz", "/usr/bin/python3", "app.pyz"),
        ("__mp_main__", "/srv/jobs/backup.py", "/usr/bin/python3", "backup.py"),
        ("jobs.backup", "/srv/jobs/backup.py", "/usr/bin/python3", "jobs.backup"),
        ("jobs.__main__", "/srv/jobs/__main__.py", "/usr/bin/python3", "jobs"),
        ("", "-c", "/usr/bin/python3", "python3"),
        ("", "", None, "python"),
    ],
)
def test_a_program_s_name_is_what_a_person_would_write(
    module: str, script: str, interpreter: str | None, name: str
) -> None:
    assert identity.program_name(module, script, interpreter) == name


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["jobs/backup.py"], "backup.py"),
        (["-m", "jobs.backup"], "jobs.backup"),
        (["-m", "jobs"], "jobs"),
        (["jobs"], "jobs"),
        (["-c", PRINTED], os.path.basename(sys.executable)),
        (["-"], os.path.basename(sys.executable)),
        (["-c", "import sys; del sys.argv; " + PRINTED], os.path.basename(sys.executable)),
    ],
)
def test_a_program_is_known_by_its_script_or_its_module(
    tmp_path: Path, arguments: list[str], name: str
) -> None:
    package = tmp_path / "jobs"
    package.mkdir()
    for file in ("backup.py", "__main__.py"):
        (package / file).write_text(PRINTED)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        input=PRINTED,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_has_its_own_process_id() -> None:
    identity.this_program()
    code = (
        "import os, sys; from tenure.identity import this_program as me; me();"
        "child = os.fork();"
        "child or os._exit(me().pid != os.getpid());"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
