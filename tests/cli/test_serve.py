"""`tenure serve --check`, and what is said to who gets the settings wrong."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tenure import blocking
from tenure.server.settings import SETTINGS
from tests.cli.programs import Tenure
from tests.engines.redis.servers import a_server
from tests.server.certificates import Authority
from tests.server.serving import serving

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _at_home(tenure: Tenure) -> None:
    tenure.environment = {**tenure.environment, "XDG_STATE_HOME": str(tenure.folder)}


def checked(tenure: Tenure, *options: str, code: int = 0, **environment: str) -> dict[str, Any]:
    done = tenure("serve", "--check", "--json", *options, **environment)
    assert (done.returncode, done.stderr) == (code, "")
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["usable"] == (code == 0)
    return told


def found(told: dict[str, Any], level: str) -> list[str]:
    return [each["found"] for each in told["findings"] if each["level"] == level]


def test_without_a_word_all_is_well_and_nothing_is_made(tenure: Tenure) -> None:
    told = checked(tenure)
    assert told["settings"].keys() == {each.name for each in SETTINGS}
    assert told["settings"]["listen"] == {
        "value": ["tenure://127.0.0.1:7070"],
        "from": "default",
    }
    assert str(tenure.folder) in told["settings"]["store"]["value"]
    assert not found(told, "failure")
    assert list(tenure.folder.iterdir()) == []


def test_where_each_setting_comes_from_is_told(tenure: Tenure) -> None:
    file = tenure.folder / "serve.toml"
    file.write_text("max-sessions = 5\n")
    told = checked(
        tenure,
        *("--config", str(file), "--log-level", "debug"),
        TENURE_SERVE_MAX_CONNECTIONS="7",
    )["settings"]
    assert told["max-sessions"] == {"value": 5, "from": str(file)}
    assert told["max-connections"] == {"value": 7, "from": "TENURE_SERVE_MAX_CONNECTIONS"}
    assert told["log-level"] == {"value": "debug", "from": "--log-level"}


def test_a_person_sees_a_table_and_what_was_found(tenure: Tenure) -> None:
    done = tenure("serve", "--check", "--store", "memory://", "--listen", "tenure://:0")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["SETTING", "VALUE", "FROM"]
    assert ["listen", "tenure://:0", "--listen"] in [line.split() for line in lines]
    assert "any client that reaches tenure://:0 is let in" in done.stdout
    assert "memory:// ends with the server" in done.stdout
    assert lines[-1] == "usable, with 2 warnings"


def test_a_store_that_is_there_is_opened(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    told = checked(tenure, "--store", tenure.url)
    assert f"{tenure.url} opens; nodes: 1" in found(told, "ok")


async def test_a_store_behind_another_server_is_as_lasting_as_that_ones(tenure: Tenure) -> None:
    async with serving(tenure.folder) as server:
        told = await asyncio.to_thread(checked, tenure, "--store", server.addresses[0])
        assert not found(told, "warning")
        await server.end()


def test_a_store_that_is_a_server_itself_is_asked(tenure: Tenure) -> None:
    with a_server() as redis:
        told = checked(tenure, "--store", redis.url)
        assert "redis" in told["settings"]["store"]["value"]
        assert any("does not exist yet" in each for each in found(told, "ok"))
        with blocking.connect(redis.url):
            pass
        assert any(
            "opens; nodes: 1" in each for each in found(checked(tenure, "--store", redis.url), "ok")
        )
    assert found(checked(tenure, "--store", redis.url, code=74), "failure")


def test_a_store_that_cannot_be_used_has_an_exit_code_of_its_own(tenure: Tenure) -> None:
    with sqlite3.connect(tenure.folder / "store.db") as foreign:
        foreign.execute("CREATE TABLE t (x)")
    foreign.close()
    (tenure.folder / "store.db").chmod(0o600)
    assert found(checked(tenure, "--store", tenure.url, code=74), "failure")
    assert found(checked(tenure, "--store", "sqlite://host/x", code=74), "failure")
    (fault,) = found(checked(tenure, "--store", "nowhere://x", code=74), "failure")
    assert "no engine is installed for nowhere://" in fault


def test_tokens_and_certificates_are_examined(tenure: Tenure) -> None:
    authority = Authority(tenure.folder)
    pair = authority.signs("server.test")
    tokens = tenure.folder / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    options = [
        *("--listen", "tenures://0.0.0.0:0", "--tls-cert", pair.cert, "--tls-key", pair.key),
        *("--tls-client-ca", authority.cert, "--auth-token-file", str(tokens)),
    ]
    told = checked(tenure, *options)
    assert f"1 token in {tokens}" in found(told, "ok")
    (certificate,) = (x for x in told["findings"] if x["what"] == "certificate")
    assert "for server.test, localhost, 127.0.0.1 until " in certificate["found"]
    assert "clients need one too" in certificate["found"]
    assert TOKEN not in json.dumps(told)
    # SQLite's own version may be one to warn of, which depends on the machine.
    assert not [
        x for x in told["findings"] if x["level"] == "warning" and x["what"] != "checkpoints"
    ]

    Path(pair.key).chmod(0o644)
    tokens.chmod(0o644)
    soon = authority.signs("soon.test", days=3)
    told = checked(
        tenure, *options, "--listen", f"tenures://:0?tls-cert={soon.cert}&tls-key={soon.key}"
    )
    warnings = "\n".join(found(told, "warning"))
    assert f"everybody may read {pair.key} (mode 0644)" in warnings
    assert f"everybody may read {tokens} (mode 0644)" in warnings
    assert "soon.test" in warnings

    other = authority.signs("other.test")
    told = checked(tenure, *options, "--tls-key", other.key, code=78)
    assert "does not belong to the certificate" in found(told, "failure")[0]
    tokens.write_text("short\n")
    told = checked(tenure, *options, code=78)
    assert "line 1: the token has 5 characters" in found(told, "failure")[0]


def test_revocation_lists_and_the_audit_log_are_examined(tenure: Tenure) -> None:
    authority = Authority(tenure.folder)
    pair, bad = authority.signs("server.test"), authority.signs("bad")
    log = tenure.folder / "audit.jsonl"
    options = [
        *("--listen", "tenures://127.0.0.1:0", "--tls-cert", pair.cert, "--tls-key", pair.key),
        *("--tls-client-ca", authority.cert, "--tls-client-crl", authority.revokes(bad)),
        *("--audit-log", str(log)),
    ]
    told = checked(tenure, *options)
    assert any("authority.crl: 1" in each for each in found(told, "ok"))
    assert f"actions are recorded in {log}" in found(told, "ok")
    assert not log.exists()

    authority.revokes(bad, days=-1)
    (warning,) = (x for x in found(checked(tenure, *options), "warning") if ".crl" in x)
    assert "is out of date since" in warning

    log.mkdir()
    (fault,) = found(checked(tenure, *options, code=78), "failure")
    assert "cannot be written" in fault


def test_what_a_listener_is_told_is_examined(tenure: Tenure) -> None:
    listen = ["--listen", "ydb://127.0.0.1:0"]
    assert not found(checked(tenure, *listen, "--advertise", "coord.test:2136"), "failure")
    (fault,) = found(checked(tenure, *listen, "--advertise", "nowhere", code=78), "failure")
    assert "'nowhere'" in fault
    (fault,) = found(checked(tenure, *listen, "--database", "local", code=78), "failure")
    assert "'local'" in fault


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-sessions", "many"], "--max-sessions is a whole number, one or more, not 'many'"),
        (["--listen", "ftp://x"], "'ftp://x' is not an address to listen at"),
        (["--loop", "gevent"], "--loop is one of auto, asyncio, uvloop, not 'gevent'"),
        (["--config", "/missing.toml"], "the file /missing.toml cannot be read"),
        (["--auth-token-file", "/missing"], "the token file /missing cannot be read"),
        (["--max-sesions", "1"], "--max-sessions"),
    ],
)
def test_a_wrong_setting_is_told_in_a_line_with_the_exit_code_for_usage(
    options: list[str], said: str, tenure: Tenure
) -> None:
    done = tenure("serve", *options)
    assert done.returncode == 78
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_all_that_is_wrong_is_told_line_by_line(tenure: Tenure) -> None:
    done = tenure("serve", "--max-sessions", "0", "--drain-time", "x", TENURE_SERVE_LOOP="y")
    assert done.returncode == 78
    assert [line.split()[1] for line in done.stderr.splitlines()] == [
        "TENURE_SERVE_LOOP",
        "--drain-time",
        "--max-sessions",
    ]
    told = checked(tenure, "--max-sessions", "0", "--drain-time", "x", code=78)
    assert len(told["faults"]) == 2


def test_what_belongs_to_clients_is_refused(tenure: Tenure) -> None:
    assert "a server's store is --store" in tenure("--url", "memory://", "serve").stderr
    assert "--json goes with --check" in tenure("serve", "--json").stderr


def test_the_help_has_every_setting_and_the_exit_codes(tenure: Tenure) -> None:
    text = tenure.inside("serve", "--help").stdout
    for setting in SETTINGS:
        assert f"  --{setting.name} " in text
    assert "Limits on the server's resources for clients:" in text
    assert "128+n" in text


@pytest.mark.parametrize(
    ("missing", "options", "said"),
    [
        ("msgspec", ["--listen", "tenure://127.0.0.1:0"], "pip install 'tenure[server]'"),
        ("ydb", ["--listen", "ydb://127.0.0.1:0"], "pip install 'tenure[server-ydb]'"),
        ("uvloop", ["--loop", "uvloop"], "pip install uvloop"),
    ],
)
def test_what_is_not_installed_is_told_with_how_to_install_it(
    missing: str, options: list[str], said: str, tenure: Tenure, tmp_path: Path
) -> None:
    without = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from tenure.cli.app import invoke; sys.exit(invoke(['serve', *sys.argv[1:]]))"
    )
    file = tmp_path / "server.db"
    for check in ([], ["--check"]):
        done = subprocess.run(
            [sys.executable, "-c", without, "--store", f"sqlite:///{file}", *options, *check],
            env=tenure.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 78
        assert missing in done.stdout + done.stderr
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert not file.exists()
