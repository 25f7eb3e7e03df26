"""What the command of `tenure run` finds in its environment, and what runs its guardian."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tenure.cli.run.holder import without_credentials, without_secrets
from tests.cli.programs import Tenure

LOCK = ("run", "--lock", "nightly")


def seen(tenure: Tenure, *options: str, **environment: str) -> Mapping[str, str]:
    """The variables that a command finds."""
    done = tenure(*LOCK, *options, "--", "env", "-0", **environment)
    assert done.returncode == 0, done.stderr
    return dict(each.split("=", 1) for each in done.stdout.split("\0") if each)


def test_a_command_gets_no_token_and_no_password(tenure: Tenure) -> None:
    found = seen(
        tenure,
        "--url",
        tenure.url,
        TENURE_TOKEN="secret",
        TENURE_URL="redis://me:secret@cache:6379/3?prefix=jobs",
        TENURE_SERVE_STORE="etcds://me:secret@a,b",
        TENURE_SERVE_LISTEN="tenure://:7070",
        OTHER="kept",
    )
    assert "secret" not in str(found)
    assert found["TENURE_URL"] == "redis://cache:6379/3?prefix=jobs"
    assert found["TENURE_SERVE_STORE"] == "etcds://a,b"
    assert found["TENURE_SERVE_LISTEN"] == "tenure://:7070"
    assert (found["OTHER"], found["TENURE_NAME"]) == ("kept", "nightly")


def test_a_command_gets_the_credentials_on_request(tenure: Tenure) -> None:
    found = seen(
        tenure,
        *("--pass-credentials", "--url", tenure.url),
        TENURE_TOKEN="secret",
        TENURE_URL="redis://me:secret@cache",
    )
    assert (found["TENURE_TOKEN"], found["TENURE_URL"]) == ("secret", "redis://me:secret@cache")


def test_a_url_without_secrets_is_passed_as_it_is(tenure: Tenure) -> None:
    assert seen(tenure)["TENURE_URL"] == tenure.url


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("tenure://TOKEN@coord:7070", "tenure://coord:7070"),
        ("tenures://TOKEN@a,b:1?tls-ca=F&busy-poll=0", "tenures://a,b:1?tls-ca=F&busy-poll=0"),
        ("tenure+unix:///run/a@b.sock", "tenure+unix:///run/a@b.sock"),
        ("rediss://:p%40ss@h/0", "rediss://h/0"),
        ("redis://h?password=p&db=2&username=u", "redis://h?db=2&username=u"),
        ("redis+sentinel://u:p@h/s?sentinel_password=p", "redis+sentinel://h/s"),
        ("etcd://h?user=u&password=p", "etcd://h?user=u"),
        ("ydbs://u:p@h/local?token=t", "ydbs://h/local"),
        ("dflockd://T@h?auth-token-file=/f", "dflockd://h?auth-token-file=/f"),
        ("dflockd://h?Auth-Token=t", "dflockd://h"),
        ("redis://h?", "redis://h"),
        ("sqlite:////data/a@b.db?mode=0660", "sqlite:////data/a@b.db?mode=0660"),
        ("no url", "no url"),
        ("", ""),
    ],
)
def test_secrets_are_taken_out_of_a_url(url: str, left: str) -> None:
    assert without_secrets(url) == left


def test_variables_of_other_programs_are_left_alone() -> None:
    other = {"DATABASE_URL": "postgres://u:p@h", "PATH": "/bin"}
    assert without_credentials(other | {"DFLOCKD_AUTH_TOKEN": "t"}) == other


# --- the guardian's interpreter

ELSEWHERE = "import sys; sys.executable = {!r}; from tenure.cli import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("interpreter", "cause"),
    [
        ("", "sys.executable is empty"),
        (None, "sys.executable is empty"),
        ("/no/such/python", "the interpreter /no/such/python is missing or cannot be executed"),
        ("/etc/passwd", "the interpreter /etc/passwd is missing or cannot be executed"),
        ("/bin/false", "its guardian, run by /bin/false, ended with exit code 1"),
        ("TEXT", "/text cannot be executed: Exec format error"),
    ],
)
def test_an_interpreter_that_cannot_be_used_is_told(
    tenure: Tenure, tmp_path: Path, interpreter: str | None, cause: str
) -> None:
    if interpreter == "TEXT":
        text = tmp_path / "text"
        text.write_text("no program")
        text.chmod(0o755)
        interpreter = str(text)
    program = [sys.executable, "-c", ELSEWHERE.format(interpreter), *LOCK, "--", "echo", "never"]
    done = subprocess.run(
        program, capture_output=True, text=True, env=tenure.environment, check=False
    )
    assert (done.returncode, done.stdout) == (126, "")
    assert done.stderr.startswith("tenure: echo cannot be guarded, and was not run: ")
    assert cause in done.stderr
    assert done.stderr.count("\n") == 1
    assert tenure(*LOCK, "--timeout", "0", "--", "true").returncode == 0  # it is free


def test_credentials_are_no_argument_of_the_guardian(tenure: Tenure) -> None:
    shown = "tr '\\0' ' ' < /proc/$PPID/cmdline"
    done = tenure(*LOCK, "--", "sh", "-c", shown, TENURE_TOKEN="secret")
    assert "guard" in done.stdout
    assert "secret" not in done.stdout + str(os.environ)
