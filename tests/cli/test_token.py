"""`tenure token`: named tokens are made, shown once, listed and revoked."""

from __future__ import annotations

import concurrent.futures
import json
import os
import stat
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tenure.server.auth import Authenticator, Peer, read_tokens
from tenure.server.auth.editing import add_token, revoke_token
from tenure.server.auth.identity import Access
from tenure.server.auth.tokens import hash_of
from tests.cli.programs import Tenure

PLAIN = "0123456789abcdef0123456789abcdef\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def test_a_token_is_shown_once_and_opens_the_server(tenure: Tenure, file: Path) -> None:
    made = tenure(
        "token", "new", "billing", "--hold", "/billing", "--read", "/", "--file", str(file)
    )
    secret = made.stdout.strip()
    assert made.returncode == 0
    assert secret.startswith("tenure_")
    assert len(secret) > 40
    assert secret not in made.stderr
    assert "is not shown again" in made.stderr
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    authenticator = Authenticator()
    authenticator.replace(read_tokens(str(file)))
    identity = authenticator.authenticate(secret, Peer())
    assert identity.name == "billing"
    assert identity.permissions.access("/billing/jobs") is Access.HOLD
    assert identity.permissions.access("/other") is Access.READ
    listed = tenure("token", "ls", "--file", str(file))
    assert secret not in listed.stdout
    assert "/=read /billing=hold" in listed.stdout


def test_a_script_gets_json(tenure: Tenure, file: Path) -> None:
    made = json.loads(
        tenure("token", "new", "a.b", "--expires-in", "1d", "--json", "--file", str(file)).stdout
    )
    assert (made["name"], made["file"]) == ("a.b", str(file))
    (listed,) = json.loads(tenure("token", "ls", "--json", "--file", str(file)).stdout)["tokens"]
    expires = datetime.fromisoformat(listed.pop("expires"))
    assert timedelta(hours=23) < expires - datetime.now(UTC) <= timedelta(days=1)
    assert listed.pop("hash") == hash_of(made["token"])
    assert listed == {"name": "a.b", "permissions": None, "quotas": {}}


def test_the_file_is_that_of_the_server_by_its_variable(tenure: Tenure, file: Path) -> None:
    missing = tenure("token", "ls")
    assert missing.returncode == 78
    assert "which token file? give --file FILE" in missing.stderr
    add_token(str(file), "a", None)
    found = tenure("token", "ls", TENURE_SERVE_AUTH_TOKEN_FILE=str(file))
    assert "everything" in found.stdout


def test_a_revoked_token_is_gone_and_everything_else_stays(tenure: Tenure, file: Path) -> None:
    add_token(str(file), "first", {"/a": "read"})
    with file.open("a") as text:
        text.write("# of the last one\n[tokens.hand]\n")
        text.write(f'hash = "sha256:{"0" * 64}"\nquotas = {{sessions = 3}}\n\n[uids.7]\n')
    add_token(str(file), "last", None)
    before = file.read_text()
    assert tenure("token", "revoke", "first", "--file", str(file)).returncode == 0
    after = file.read_text()
    assert [each.name for each in read_tokens(str(file)).tokens] == ["hand", "last"]
    assert "# of the last one\n[tokens.hand]" in after
    assert [line for line in before.splitlines() if line not in after.splitlines()] == [
        line for line in before.splitlines() if "first" in line or "/a" in line or "hash" in line
    ][:3]
    assert tomllib.loads(after)["uids"] == {"7": {}}


def test_a_rotated_token_has_two_secrets_until_the_end(tenure: Tenure, file: Path) -> None:
    first = add_token(str(file), "a.b", {"/a": "read"})
    other = add_token(str(file), "other", None)

    def valid(secret: str) -> bool:
        authenticator = Authenticator()
        authenticator.replace(read_tokens(str(file)))
        try:
            return authenticator.authenticate(secret).owner == "token a.b"
        except PermissionError:
            return False

    second = tenure("token", "rotate", "a.b", "--file", str(file)).stdout.strip()
    assert valid(first)
    assert valid(second)
    made = tenure("token", "rotate", "a.b", "--json", "--file", str(file)).stdout
    third = json.loads(made)["token"]
    assert [valid(each) for each in (first, second, third)] == [False, True, True]
    listed = tenure("token", "ls", "--file", str(file)).stdout
    assert listed.count("a.b") == 2
    assert tenure("token", "rotate", "a.b", "--finish", "--file", str(file)).returncode == 0
    assert [valid(each) for each in (first, second, third)] == [False, False, True]
    finished = file.read_text()
    assert tenure("token", "rotate", "a.b", "--finish", "--file", str(file)).returncode == 0
    assert file.read_text() == finished
    assert hash_of(other) in finished


def test_who_revokes_the_last_token_is_told_that_no_server_loads_the_file(
    file: Path, tenure: Tenure
) -> None:
    add_token(str(file), "one", None)
    add_token(str(file), "other", None)
    assert "refuses to load" not in tenure("token", "revoke", "one", "--file", str(file)).stderr
    assert "refuses to load" in tenure("token", "revoke", "other", "--file", str(file)).stderr
    check = tenure("serve", "--check", "--store", "memory://", "--auth-token-file", str(file))
    assert "has no token, so no client could use the server" in check.stdout + check.stderr
    assert check.returncode != 0


def test_a_file_whose_last_token_is_revoked_opens_nothing(file: Path, tenure: Tenure) -> None:
    secret = add_token(str(file), "only", None)
    revoke_token(str(file), "only")
    assert "has no tokens" in tenure("token", "ls", "--file", str(file)).stdout
    authenticator = Authenticator()
    authenticator.replace(read_tokens(str(file)))
    assert authenticator.required
    for token in ("", secret):
        with pytest.raises(PermissionError):
            authenticator.authenticate(token)


def test_its_owner_and_mode_stay_and_a_link_is_followed(file: Path, tmp_path: Path) -> None:
    add_token(str(file), "a", None)
    file.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(file)
    add_token(str(link), "b", None)
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.stat().st_uid == os.getuid()
    assert {each.name for each in tmp_path.iterdir()} == {"tokens.toml", "link"}


def test_changes_at_a_time_wait_for_each_other(file: Path) -> None:
    names = [f"n{number}" for number in range(20)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_token(str(file), name, None), names))
    assert sorted(each.name for each in read_tokens(str(file)).tokens) == sorted(names)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("", ["new", "a b"], "NAME: a token's name is 1 to 64 letters"),
        ("", ["new", "a", "--read", "billing"], "permissions are given for a node or '/'"),
        ("", ["new", "a", "--read", "/x", "--hold", "/x"], "/x has two levels"),
        ("", ["new", "a", "--expires-in", "soon"], "no length of time"),
        ("", ["revoke", "a"], "has no token a; it has: none"),
        (f'[tokens.a]\nhash = "sha256:{"0" * 64}"\n', ["new", "a"], "has a token a already"),
        (f'[tokens.a]\nhash = "sha256:{"0" * 64}"\n', ["revoke", "b"], "no token b; it has: a"),
        (PLAIN, ["new", "a"], "has plain tokens, one on each line"),
        (
            f'[tokens]\na = {{hash = "sha256:{"0" * 64}"}}\n',
            ["revoke", "a"],
            "has a form that this command cannot change; edit it by hand",
        ),
        ("", ["rotate", "a"], "has no token a; it has: none"),
        (
            f'[tokens.a]\nhash = [\n"sha256:{"0" * 64}"]\n',
            ["rotate", "a"],
            "has a form that this command cannot change; edit it by hand",
        ),
        ("[tokens.a]\nhash = []\n", ["ls"], "hash is an empty list"),
        ("[tokens.a]\n", ["ls"], "[tokens.a]: hash is missing"),
        ("[tokens.a]\nhash = 'sha256:1'\n", ["ls"], "64 hexadecimal digits"),
        ("[tokens.a]\nhsh = 'sha256:1'\n", ["ls"], "there is no 'hsh'; there are hash"),
        ("[tokens.a\n", ["ls"], "is not TOML"),
        ("[tokens.a]\nhash\n", ["ls"], "is not TOML"),
        ("[tokens]\n[other]\n", ["ls"], "there is no table 'other'"),
        ("tokens = 1\n[uids]\n", ["ls"], "tokens is a table"),
        ("[tokens]\na = 1\n", ["ls"], "[tokens.a] is a table"),
        ("[uids.me]\n", ["ls"], "[uids.me]: a uid is a number"),
        ("[uids.1]\npermissions = 1\n", ["ls"], "[uids.1]: permissions is a table"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_changed(
    content: str, arguments: list[str], said: str, file: Path, tenure: Tenure
) -> None:
    file.write_text(content)
    done = tenure("token", *arguments, "--file", str(file))
    assert done.returncode == 78
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert file.read_text() == content


def test_a_folder_that_is_missing_is_an_error(tenure: Tenure, tmp_path: Path) -> None:
    done = tenure("token", "new", "a", "--file", str(tmp_path / "missing" / "tokens"))
    assert done.returncode == 78
    assert "cannot be changed: No such file or directory" in done.stderr
