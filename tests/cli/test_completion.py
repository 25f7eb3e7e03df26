"""What a shell is offered at a Tab, and the manual page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from tenure.cli.app import LazyGroup
from tenure.cli.app import tenure as whole
from tenure.cli.manual import manual_page
from tests.cli.programs import TENURE, Tenure, eventually

TURN = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
print("there", flush=True)
signal.pause()
"""


def offered(tenure: Tenure, line: str) -> list[str]:
    """What a line is completed to; nothing is ever said."""
    words = line.split(" ")
    done = tenure(_TENURE_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert (done.returncode, done.stderr) == (0, "")
    return [each.removeprefix("plain,") for each in done.stdout.splitlines() if each]


def completes(tenure: Tenure, line: str, expected: list[str]) -> None:
    """It does; or it offers nothing, when this machine is too busy for an answer at once."""

    def answered() -> bool:
        found = offered(tenure, line)
        assert found in (expected, [])
        return found == expected

    eventually(answered)


def test_commands_options_and_choices_are_offered(tenure: Tenure) -> None:
    assert offered(tenure, "tenure des") == ["describe"]
    assert offered(tenure, "tenure do") == ["doctor"]
    assert set(offered(tenure, "tenure ")) >= set(LazyGroup.MODULES)
    assert offered(tenure, "tenure node a") == ["alter"]
    assert offered(tenure, "tenure run --rec") == ["--recovery-window"]
    assert offered(tenure, "tenure completion z") == ["zsh"]
    assert offered(tenure, "tenure nonsense x") == []
    assert offered(tenure, "tenure run --lock x -- ba") == ["file,ba"]
    assert list(tenure.folder.iterdir()) == []  # no store is made for it


def test_what_is_in_the_store_is_offered(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/billing")
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    tenure.inside("sem", "create", "$(reboot)", "--limit", "2")
    tenure.inside("sem", "create", "two words", "--limit", "2")
    tenure.inside("sem", "create", "bills", "--limit", "2", "--node", "/billing")
    tenure.hold()
    completes(tenure, "tenure describe ", ["gpu", "nightly"])
    for command in ("evict", "run --lock"):
        completes(tenure, f"tenure {command} ni", ["nightly"])
    completes(tenure, "tenure describe --node /billing ", ["bills"])
    for command in ("ls", "describe x --node"):
        completes(tenure, f"tenure {command} /b", ["/billing"])
    assert offered(tenure, "tenure sem create ") == []
    assert offered(tenure, "tenure describe --node /nowhere ") == []
    (tenure.folder / "bad.db").write_text("no database" * 100)
    for url in ("nonsense", "memory://", f"sqlite:///{tenure.folder}/bad.db", "sqlite:///no.db"):
        assert offered(tenure, f"tenure describe --url {url} ") == []
    assert not (tenure.folder / "no.db").exists()


def test_a_stuck_store_keeps_nobody_waiting(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    turn = str(tenure.folder / "store.db.tenure" / "turn.lock")
    with subprocess.Popen(
        [sys.executable, "-c", TURN, turn], stdout=subprocess.PIPE, text=True
    ) as stuck:
        try:
            assert stuck.stdout is not None
            assert stuck.stdout.readline() == "there\n"
            at = time.monotonic()
            assert offered(tenure, "tenure describe ") in (["gpu"], [])
            assert time.monotonic() - at < 20
        finally:
            stuck.kill()


def test_bash_completes_with_the_script(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "2")
    program = tenure.folder / "bin" / "tenure"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec " + " ".join(f"'{each}'" for each in TENURE) + ' "$@"\n')
    program.chmod(0o755)
    script = (
        'set -e; eval "$(tenure completion bash)"; COMP_WORDS=(tenure describe g); COMP_CWORD=2\n'
        '_tenure_completion tenure; echo "${COMPREPLY[@]}"; complete -p tenure'
    )

    def completed() -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", script],
            env={**tenure.environment, "PATH": f"{program.parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        first, second = done.stdout.splitlines()
        assert first in {"gpu", ""}  # nothing, when the machine is too busy
        assert "_tenure_completion" in second
        return first.split()

    eventually(completed)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_they_can_read(tenure: Tenure, shell: str) -> None:
    script = tenure.inside("completion", shell).stdout
    assert f"_TENURE_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_is_a_mistake(tenure: Tenure) -> None:
    done = tenure.inside("completion", "tcsh")
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert "'tcsh' is not one of" in done.stderr
    assert tenure(_TENURE_COMPLETE="tcsh_complete").returncode == 1


# The manual


def commands(group: click.Group, path: str) -> list[str]:
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append(f"{path} {name}")
        if isinstance(command, click.Group):
            found += commands(command, f"{path} {name}")
    return found


def test_the_manual_has_every_command_and_exit_code(tenure: Tenure) -> None:
    page = tenure.inside("man").stdout
    plain = page.replace("\\-", "-")
    lines = plain.splitlines()
    assert lines[0].startswith(".TH TENURE 1 ")
    for path in commands(whole, "tenure"):
        assert any(line.startswith(f".SS {path}") for line in lines), path
    status = plain.partition(".SH EXIT STATUS")[2].partition(".SH")[0]
    for code in ("0", "70", "73", "74", "75", "76", "78", "79", "126", "127", "128+n"):
        assert f".B {code}\n" in status
    for line in page.splitlines():
        # Nothing but the few requests that are used here; the rest is text.
        if line[:1] in {".", "'"}:
            assert line.split()[0] in {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".BR", ".nf", ".fi"}


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff here")
def test_groff_has_nothing_to_complain_about(tmp_path: Path) -> None:
    page = tmp_path / "tenure.1"
    page.write_text(manual_page(whole), encoding="ascii")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", str(page)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "one at a time, like flock(1)\n" in done.stdout
